"""Files of GDN-2's own training code are read: a model written down here, token by token in float64, gives the same scores."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

import qed_probe as qp
from qed_probe import cli

HIDDEN, LAYERS, HEADS, K, FFN, VOCAB = 12, 2, 3, 4, 10, 64


def weights() -> dict[str, Tensor]:
    """Random weights by the names that the code gives them, its gates lively."""
    torch.manual_seed(0)
    width, shapes = HEADS * K, {"lm_head": (VOCAB, HIDDEN), "transformer.wte": (VOCAB, HIDDEN), "transformer.ln_f": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}"
        shapes |= {f"{at}.norm_1": (HIDDEN,), f"{at}.norm_2": (HIDDEN,), f"{at}.attn.o_norm": (K,)}
        shapes |= {f"{at}.attn.{x}_proj": (width, HIDDEN) for x in "qkvbw"} | {f"{at}.attn.o_proj": (HIDDEN, width)}
        shapes |= {f"{at}.attn.{x}_conv1d": (width, 1, 4) for x in "qkv"}
        shapes |= {f"{at}.attn.{x}_proj.{i}": size for x in "fg" for i, size in enumerate([(K, HIDDEN), (width, K)])}
        shapes |= {f"{at}.mlp.swiglu.w{i}": (HIDDEN, FFN) if i == 3 else (FFN, HIDDEN) for i in (1, 2, 3)}
    found = {f"{name}.weight": torch.randn(shape) * (0.5 if len(shape) > 1 else 0.2) for name, shape in shapes.items()}
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}.attn"
        found |= {
            f"{at}.A_log": torch.rand(HEADS),
            f"{at}.dt_bias": torch.randn(width),
            f"{at}.g_proj.1.bias": torch.randn(width),
        }
    return found


def save(path: Path, model: dict[str, Tensor]) -> Path:
    torch.save({"model": model, "hparams": {"learning_rate": 1e-3, "name": "gdn2"}, "iter_num": 7, "step_count": 7}, path)
    return path


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum() + 1e-6)


def mix(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """One layer's memory over ``x`` ``[T, hidden]``."""
    streams = {}
    for name in "qkv":
        projected = x @ w[f"{name}_proj.weight"].T
        padded = torch.cat([projected.new_zeros(3, projected.shape[1]), projected])
        taps = w[f"{name}_conv1d.weight"][:, 0]
        streams[name] = silu(torch.stack([(padded[t : t + 4] * taps.T).sum(0) for t in range(len(x))])).view(len(x), HEADS, K)
    g = softplus(x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]).view(len(x), HEADS, K)
    g = -g * w["A_log"].exp()[:, None]
    b, gate = (torch.sigmoid(x @ w[f"{name}_proj.weight"].T).view(len(x), HEADS, K) for name in "bw")
    out = silu(x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]).view(len(x), HEADS, K)
    rows = []
    S = x.new_zeros(HEADS, K, K)
    for t in range(len(x)):
        row = []
        for h in range(HEADS):
            q, k = unit(streams["q"][t, h]), unit(streams["k"][t, h])
            S[h] = g[t, h].exp()[:, None] * S[h]
            S[h] = S[h] + torch.outer(k, gate[t, h] * streams["v"][t, h] - S[h].T @ (b[t, h] * k))
            row.append(norm(S[h].T @ q / math.sqrt(K), w["o_norm.weight"]) * out[t, h])
        rows.append(torch.cat(row))
    return torch.stack(rows) @ w["o_proj.weight"].T


def scores(model: dict[str, Tensor], ids: Tensor) -> Tensor:
    """What the model says of the next token, in float64."""
    w = {name: x.double() for name, x in model.items()}
    x = w["transformer.wte.weight"][ids]
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}."
        own = {name.removeprefix(at + "attn."): value for name, value in w.items() if name.startswith(at + "attn.")}
        x = x + mix(norm(x, w[at + "norm_1.weight"]), own)
        y = norm(x, w[at + "norm_2.weight"])
        one, two, three = (w[f"{at}mlp.swiglu.w{i}.weight"] for i in (1, 2, 3))
        x = x + (silu(y @ one.T) * (y @ two.T)) @ three.T
    return norm(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T


def call(monkeypatch: pytest.MonkeyPatch, *command: object) -> int:
    monkeypatch.setattr(sys, "argv", ["qed-probe", *map(str, command)])
    return cli.main()


def test_the_model_is_the_one_written_down(tmp_path: Path) -> None:
    model, ids = weights(), torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1))
    loaded = qp.load_model(save(tmp_path / "iter-7-model-ckpt.pth", model))
    with torch.no_grad():
        found = loaded.logits(loaded(ids[None]))[0]
    expected = scores(model, ids)
    # Without the 1e-6 under the root of q and k the error is 7e-6.
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_it_is_traced_and_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path, prompts = save(tmp_path / "model.pth", weights()), tmp_path / "prompts.jsonl"
    prompts.write_text('{"tokens": [1, 2, 3, 4, 5]}\n')
    assert call(monkeypatch, "trace", path, "--prompts", prompts, "-o", tmp_path / "run.zarr") == 0
    assert (qp.open(tmp_path / "run.zarr").attrs["mixer"], qp.open(tmp_path / "run.zarr").sizes["layer"]) == ("gdn2", LAYERS)
    capsys.readouterr()
    assert call(monkeypatch, "info", path) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("gdn2", "silu", f"{HIDDEN}", f"{VOCAB}"))


def hybrid(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in model.items() if "h.1.attn" not in name} | {"transformer.h.1.attn.attn.weight": torch.zeros(3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hybrid, "layers of GDN-2 alone, found layer 1 without its w_proj"),
        (lambda model: {}, "found no layer"),
        (lambda model: model | {"transformer.h.0.attn.extra": torch.zeros(1)}, "found besides them layers.0.mixer.extra"),
        (lambda model: {name: x for name, x in model.items() if "ln_f" not in name}, "missing norm.weight"),
        (
            lambda model: {name: x for name, x in model.items() if "h.0.attn.A_log" not in name},
            "found others: 'layers.0.mixer.A_log'",
        ),
        (lambda model: model | {"lm_head.weight": torch.full((VOCAB, HIDDEN), torch.nan)}, "NaN or infinity in head.weight"),
        (lambda model: model | {"lm_head.weight": "none"}, "found none there"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_one_line(
    change: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(change)
    path = save(tmp_path / "model.pth", change(weights()))
    assert call(monkeypatch, "trace", path, "--tokens", tmp_path / "none.npy") == 2
    err = capsys.readouterr().err
    if "none.npy" in err:  # the sizes are sound; the weights are read when the prompts are
        (tmp_path / "one.jsonl").write_text('{"tokens": [1]}\n')
        assert call(monkeypatch, "trace", path, "--prompts", tmp_path / "one.jsonl", "-o", tmp_path / "run.zarr") == 2
        err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_no_code_of_the_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pth"
    torch.save({"model": weights(), "hparams": Path("x")}, path)
    assert call(monkeypatch, "info", path) == 2
    assert "would run its own code" in capsys.readouterr().err
    path.write_bytes(save(tmp_path / "whole.pth", weights()).read_bytes()[:2000])
    assert call(monkeypatch, "info", path) == 2
    assert "found one damaged" in capsys.readouterr().err
    assert call(monkeypatch, "trace", tmp_path / "absent.pth") == 2
    assert "found nothing" in capsys.readouterr().err
