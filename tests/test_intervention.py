"""What is changed in a running model is what a model of the other arm, or of other weights, does."""

from functools import partial

import pytest
import torch
from torch import Tensor

import qed_probe as qp
from qed_probe.evaluation import read_answers
from qed_probe.models.config import ModelConfig
from qed_probe.models.intervention import Intervention, intervene
from qed_probe.models.language import LanguageModel

SIZES = {"hidden": 24, "layers": 2, "heads": 3, "key_dim": 8, "value_dim": 8, "ffn": 24, "vocab_size": 256, "tokenizer": "bytes"}
TOKENS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))


def model(mixer: str) -> LanguageModel:
    """Random weights with lively directions and addresses."""
    torch.manual_seed(3)
    made = LanguageModel(ModelConfig(mixer=mixer, **SIZES)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(2.0, 1.0) if name.endswith("theta") else p.mul_(3.0) if p.ndim > 1 else None
    return made


def as_arm(trained: LanguageModel, mixer: str) -> LanguageModel:
    """The same weights in another arm, as far as it has them."""
    other = LanguageModel(ModelConfig(mixer=mixer, **SIZES)).eval()  # type: ignore[arg-type]
    missing = other.load_state_dict(trained.state_dict(), strict=False).missing_keys
    assert all("random" in name for name in missing)
    return other


@torch.inference_mode()
def seen(one: LanguageModel) -> list[tuple[Tensor, Tensor]]:
    """What each layer's memory gave, and its last state."""
    with qp.capture(one) as records:
        one(TOKENS)
    return [(record.observation.y, record.observation.final_state) for record in records]


@torch.inference_mode()
def hidden(one: LanguageModel) -> Tensor:
    found: Tensor = one(TOKENS)
    return found


@pytest.mark.parametrize(
    ("mixer", "direction", "arm"),
    [
        ("qed", "nogate", "qed-nogate"),
        ("qed", "noproj", "qed-noproj"),
        ("qed", "nogate-noproj", "qed-nogate-noproj"),
        ("qed-noproj", "full", "qed"),
        ("qed-rand", "full", "qed"),
        ("eda", "same", "eda-same"),
        ("eda", "reversed", "eda-reversed"),
    ],
)
def test_another_direction_is_the_other_arm(mixer: str, direction: str, arm: str) -> None:
    one = model(mixer)
    before, expected = hidden(one), hidden(as_arm(one, arm))
    intervene(one, Intervention(direction=direction))
    assert torch.equal(hidden(one), expected)
    assert not torch.allclose(expected, before, atol=1e-3)
    intervene(one, Intervention())
    assert torch.equal(hidden(one), before)


@pytest.mark.parametrize(("mixer", "arm"), [("qed", "gdn2"), ("eda", "kda-safegate"), ("eda-same", "kda-safegate")])
def test_without_strength_the_direction_or_the_address_is_gone(mixer: str, arm: str) -> None:
    one = model(mixer)
    before, expected = hidden(one), hidden(as_arm(one, arm))
    intervene(one, Intervention(strength=0.0))
    assert torch.allclose(hidden(one), expected, atol=1e-5)
    assert not torch.allclose(expected, before, atol=1e-3)


@pytest.mark.parametrize("mixer", ["qed", "eda"])
@pytest.mark.parametrize("change", [{"strength": -0.5}, {"direction": "rand"}, {"strength": 2.0, "direction": "rand"}])
def test_a_head_is_changed_alone(mixer: str, change: dict[str, object]) -> None:
    one = model(mixer)
    usual = seen(one)[0]
    intervene(one, Intervention(**change))  # type: ignore[arg-type]
    everywhere = seen(one)[0]
    intervene(one, Intervention(**change, at=((0, 1),)))  # type: ignore[arg-type]
    y, state = seen(one)[0]
    assert torch.equal(y[:, :, [0, 2]], usual[0][:, :, [0, 2]])
    assert torch.equal(state[:, [0, 2]], usual[1][:, [0, 2]])
    assert torch.equal(y[:, :, 1], everywhere[0][:, :, 1])
    assert torch.equal(state[:, 1], everywhere[1][:, 1])
    assert not torch.allclose(y[:, :, 1], usual[0][:, :, 1], atol=1e-3)


def test_random_vectors_are_those_of_the_seed() -> None:
    one = model("eda")
    found = []
    for seed in (0, 0, 1):
        intervene(one, Intervention(direction="rand"), seed)
        found.append(hidden(one))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], atol=1e-3)


def test_a_change_holds_in_its_phase_alone() -> None:
    one, off = model("qed"), Intervention(strength=0.0)
    expected = {}
    for phase, (prompt, answer) in {"all": (off, off), "prompt": (off, Intervention()), "answer": (Intervention(), off)}.items():
        intervene(one, prompt)
        cache = one.new_cache(2)
        with torch.inference_mode():
            states = [one(TOKENS[:, :-5], cache=cache)]
            intervene(one, answer)
            states.append(one(TOKENS[:, -5:-1], cache=cache))
            logits = one.logits(torch.cat(states, 1))
        expected[phase] = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="none")
    assert not torch.allclose(expected["all"], expected["prompt"], atol=1e-4)
    assert not torch.allclose(expected["all"], expected["answer"], atol=1e-4)
    for phase, nll in expected.items():
        change = Intervention(strength=0.0, phase=phase)
        intervene(one, change.during("prompt"))
        _, found = read_answers(one, TOKENS, 5, partial(intervene, one, change.during("answer")))
        assert torch.allclose(found.flatten(), nll, atol=1e-5)


@pytest.mark.parametrize(
    ("mixer", "change", "words"),
    [
        ("gdn2", Intervention(strength=0.0), "adds a direction or erases at an address.*found one of gdn2"),
        ("kda", Intervention(direction="same"), "found one of kda"),
        ("qed", Intervention(direction="same"), "direction: expected own, full.*found 'same'"),
        ("eda", Intervention(direction="nogate"), "direction: expected own, same, rand, reversed for eda, found 'nogate'"),
        ("eda-gdn2", Intervention(direction="same"), "makes another arm of eda-gdn2, found 'same'"),
        ("qed", Intervention(strength=float("nan")), "strength: expected a finite number, found nan"),
        ("qed", Intervention(strength=0.0, at=((2, 0),)), "layers 0 to 1 and heads 0 to 2, found 2:0"),
        ("qed", Intervention(strength=0.0, at=((0, 3),)), "found 0:3"),
        ("qed", Intervention(at=((0, 1),)), "at, phase: expected a strength, a direction or a mode to go with them, found none"),
        (
            "qed",
            Intervention(phase="answer"),
            "at, phase: expected a strength, a direction or a mode to go with them, found none",
        ),
        ("qed", Intervention(strength=0.0, phase="later"), "phase: expected one of all, prompt, answer, found 'later'"),
    ],
)
def test_what_cannot_be_changed_is_refused(mixer: str, change: Intervention, words: str) -> None:
    with pytest.raises(qp.InputError, match=words):
        intervene(model(mixer), change)
