"""Arms of one experiment: whatever the mixer, as many parameters; and the bound of λ where there is a λ."""

from itertools import product

import pytest

from qed_probe.errors import InputError
from qed_probe.models.config import NATIVE, PRESETS, preset
from qed_probe.models.language import LanguageModel
from qed_probe.training.arms import arm, parameters


@pytest.mark.parametrize(("size", "mixer"), [*product(PRESETS, NATIVE)])
def test_every_arm_has_as_many_parameters(size: str, mixer: str) -> None:
    config, like = arm(mixer, size), preset(size, "qed")
    assert abs(parameters(config) / parameters(like) - 1) < 5e-4
    assert (config.mixer, config.hidden, config.layers, config.heads) == (mixer, like.hidden, like.layers, like.heads)
    assert (config.key_dim, config.value_dim) == (like.key_dim, like.value_dim)


def test_parameters_are_those_of_the_model() -> None:
    config = arm("eda")
    assert parameters(config) == sum(p.numel() for p in LanguageModel(config).parameters())
    assert arm("qed") == preset("tiny", "qed")
    assert arm("eda").ffn > preset("tiny", "eda").ffn


def test_lambda_max_is_for_mixers_that_add_a_direction() -> None:
    assert arm("qed", lambda_max=0.5).lambda_max == 0.5
    assert arm("qed", lambda_max=0.0).lambda_max == 0
    with pytest.raises(InputError, match=r"lambda_max: expected none, as gdn2 adds no direction, found 0\.5"):
        arm("gdn2", lambda_max=0.5)
    with pytest.raises(InputError, match="lambda_max: expected 0 or more, found -1"):
        arm("qed", lambda_max=-1.0)
    with pytest.raises(InputError, match="lambda_max: expected a finite number, found nan"):
        arm("qed", lambda_max=float("nan"))
    with pytest.raises(InputError, match="mixer: expected one of"):
        arm("rwkv7")
