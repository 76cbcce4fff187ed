"""Time what is computed of a trace against a plain zarr read of the same arrays: ``python -m benchmarks.analyses``.

Each analysis runs in a process of its own over a store of made-up records, in turns with a loop that reads the arrays which it
needs, chunk by chunk, by zarr alone. Once the store is in the page cache, and then from the disk, of whose files the cache is
rid before each turn. Peak memory is all that the process ever holds, Python and the libraries included. Analyses of ``inputs``,
which are many times as large, have a smaller store. Nothing is timed if a mean is not what NumPy finds.
"""

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from qed_probe import analyses
from qed_probe.analyses import correction
from qed_probe.store import reader, writer
from qed_probe.store.layout import Layout
from qed_probe.tasks import Prompt
from tests.synthetic_inputs import synthetic_inputs
from tests.synthetic_store import TEXT, synthetic_store

ROUNDS = 3
LAYERS, HEADS, KEY, LENGTH = {"records": 24, "inputs": 2}, 16, 64, 4096
BUDGETS = ("retention", "budget_decay", "budget_delta", "budget_erase")
RECORDS: dict[str, tuple[Callable[[xr.Dataset], object], tuple[str, ...]]] = {
    "eigenvalues": (analyses.eigenvalues, ("eigenvalue", "eigenvalue_unit")),
    "rho": (analyses.rho, ("rho",)),
    "rho_read": (analyses.rho_read, ("rho", "read_norm")),
    "correction_share": (analyses.correction_share, correction.NAMES),
    "half_life": (analyses.half_life, ("log_decay", "log_decay_max")),
    "gate_budgets": (analyses.gate_budgets, BUDGETS),
    "summary": (analyses.summary, (*correction.NAMES, "eigenvalue", *BUDGETS[1:], "log_decay")),
    "record_quantiles": (lambda ds: analyses.record_quantiles([ds], "rho"), ("rho",)),
    "record_contrast": (lambda ds: analyses.record_contrast(ds, ds, "rho"), ("rho", "rho")),
    "difference": (lambda ds: analyses.difference(only(ds, "rho"), only(ds, "rho")), ("rho", "rho")),
}
INPUTS: dict[str, tuple[Callable[[xr.Dataset, xr.Dataset], object], tuple[str, ...]]] = {
    "address_geometry": (analyses.address_geometry, ("q", "k", "d", "gamma", "b")),
    "gate_saturation": (analyses.gate_saturation, ("g", "b", "w", "gamma")),
    "energy_ledger": (analyses.energy_ledger, ("g", "k", "a", "u")),
}


def only(ds: xr.Dataset, name: str) -> xr.Dataset:
    """A trace with one record."""
    return ds.drop_vars([other for other in ds.data_vars if other != name])


def make_store(path: Path, kind: str, token_heads: int) -> int:
    """Write prompts of the same made-up records, or inputs beside them, over and over; returns how many token-heads."""
    layers = LAYERS[kind]
    copies = -(-token_heads // (layers * HEADS * LENGTH))
    ds = synthetic_store(layers, HEADS, 1, (TEXT * LENGTH)[:LENGTH], "eda-qed")
    arrays = {name: x for name, x in ds.data_vars.items() if x.dims == ("layer", "token", "head")}
    if kind == "inputs":
        arrays = {f"inputs/{name}": x for name, x in synthetic_inputs(ds, KEY).data_vars.items()}
    prompt = Prompt(ds["token_id"].values, ds["role"].values.astype(str))
    layout = Layout(
        names=tuple(map(str, arrays)),
        layers=tuple(range(layers)),
        heads=HEADS,
        key=KEY,
        value=KEY,
        edits=2,
        prompts=[prompt] * copies,
        lengths=np.full(copies, LENGTH),
        fingerprints=np.full(copies, prompt.fingerprint),
        roles=True,
        lam=ds["lambda"].values,
        attrs={**ds.attrs, "checkpoint_digest": "made up"},
    )
    with writer.create(path, layout) as out:
        for start in range(0, copies * LENGTH, LENGTH):
            for name, x in arrays.items():
                for layer, values in enumerate(x.values):
                    out.write(str(name), values, layer=layer, start=start)
            out.commit(start + LENGTH)
        out.finish()
    os.sync()
    return copies * LENGTH * layers * HEADS


def chunks(x: "zarr.Array[Any]") -> list[tuple[slice, slice]]:
    """Layers and tokens of each chunk; heads and channels are whole in all."""
    layers, tokens = (range(0, whole, part) for whole, part in zip(x.shape[:2], x.chunks[:2], strict=True))
    return [(slice(i, i + layers.step), slice(t, t + tokens.step)) for i in layers for t in tokens]


def read(arrays: "list[zarr.Array[Any]]") -> None:
    """A plain read: one chunk after another, none kept."""
    for x in arrays:
        for place in chunks(x):
            x[place]


def forget(path: Path, names: tuple[str, ...]) -> None:
    """Rid the page cache of these arrays."""
    for name in {*names}:
        for file in (path / name).glob("c.*"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(name: str, path: Path, cold: bool) -> tuple[float, float, float]:
    """Seconds of the analysis and of the plain read over them, medians of the rounds, and GB at most."""
    ds = reader.open(path)
    work: Callable[[], object]
    if name in RECORDS:
        (analysis, names) = RECORDS[name]
        work = lambda: analysis(ds)  # noqa: E731
    else:
        inputs, (of_inputs, names) = reader.open_inputs(path), INPUTS[name]
        names = tuple(f"inputs/{name}" for name in names)
        work = lambda: of_inputs(ds, inputs)  # noqa: E731
    group = zarr.open_group(path, mode="r")
    arrays = [x for x in (group[name] for name in names) if isinstance(x, zarr.Array)]
    forms: dict[str, Callable[[], object]] = {"analysis": work, "plain": lambda: read(arrays)}
    rounds = []
    for _ in range(ROUNDS if name in RECORDS else 1):
        times = {}
        for form, run in forms.items():
            if cold:
                forget(path, names)
            begun = time.perf_counter()
            run()
            times[form] = time.perf_counter() - begun
        rounds.append(times)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e9
    return (
        statistics.median(times["analysis"] for times in rounds),
        statistics.median(times["plain"] / times["analysis"] for times in rounds),
        peak,
    )


def apart(name: str, path: Path, cold: bool = False) -> tuple[float, float, float]:
    """``measure`` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, path, cold))


def error(path: Path) -> float:
    """How far the mean of ρ lies from NumPy's over the first prompt, which all others repeat."""
    ds = reader.open(path)
    expected = ds["rho"].isel(token=slice(0, LENGTH)).values.mean((1, 2), dtype=np.float64)
    return float(np.abs(analyses.rho(ds)["mean"].values - expected).max())


def main() -> int:
    """Print a table; 1 if an analysis is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--token-heads", type=int, default=100_000_000, help="of the store of records")
    parser.add_argument("--input-token-heads", type=int, default=1_000_000, help="of the store of inputs")
    parser.add_argument("--only", nargs="+", choices=[*RECORDS, *INPUTS], default=[*RECORDS, *INPUTS], help="these analyses")
    parser.add_argument("--folder", type=Path, help="where the stores are made; a temporary folder if none is named")
    options = parser.parse_args()
    names = ", ".join(f"{name} {version(name)}" for name in ("numpy", "zarr", "xarray", "dask"))
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {names}; medians of {ROUNDS} rounds")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kind, table, size in (("records", RECORDS, options.token_heads), ("inputs", INPUTS, options.input_token_heads)):
            path, chosen = Path(folder) / f"{kind}.zarr", [name for name in options.only if name in table]
            if not chosen:
                continue
            count = make_store(path, kind, size)
            if kind == "records" and not (off := error(path)) <= 1e-9:
                print(f"the mean of ρ is off by {off:.1e}, nothing timed")
                return 1
            print(f"\n{count / 1e6:.1f} million token-heads: {LAYERS[kind]} layers, {HEADS} heads, prompts of {LENGTH} tokens\n")
            print("| analysis | ns a token-head | of plain read | from disk, ns | of plain read | peak, GB |")
            print("|---|---|---|---|---|---|")
            for name in chosen:
                warm, ratio, peak = apart(name, path)
                cold, cold_ratio, _ = apart(name, path, cold=True)
                row = f"{1e9 * warm / count:.1f} | {ratio:.2f} | {1e9 * cold / count:.1f} | {cold_ratio:.2f} | {peak:.2f}"
                print(f"| {name} | {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
