"""What one head's d, ε, γ or S carries of an answer: patched scores against unpatched, pair by pair."""

import numpy as np
import xarray as xr

from qed_probe.analyses.changes import paired_interval
from qed_probe.analyses.heads import controlled

DIMS = ("what", "way", "layer", "head")


def patch_effects(patches: xr.Dataset) -> xr.Dataset:
    """How far a patch moves ln p(clean answer) − ln p(corrupted answer), pair by pair, and as a share of the whole difference.

    Takes what ``qp.patch`` returns. Dims ``what``, ``way``, ``layer``, ``head``: ``difference``, the mean over pairs of the
    patched score minus that of the same run unpatched, nats; ``low`` and ``high``, Student's 95 % interval; ``p`` of the paired
    t test and ``p_fdr``, adjusted over the heads of a part and a way by Benjamini and Hochberg; ``ratio``, mean difference /
    mean of (the other run's score − this run's), 0 where the patch does nothing and 1 where the run becomes the other, NaN
    where the runs do not differ. ``full``, ``full_low`` and ``full_high`` are clean − corrupted, unpatched; ``pairs`` how many.
    Ranges of e are passed on. Raises InputError for scores that are not finite.
    """
    patched, full = patches["patched"].transpose(*DIMS, "pair"), patches["clean"] - patches["corrupted"]
    usual = xr.concat([patches["corrupted"], patches["clean"]], "way").assign_coords(way=["denoising", "noising"])
    change = (patched - usual).transpose(*DIMS, "pair")
    names = ("difference", "low", "high", "p")
    values = np.zeros((len(names), *change.shape[:-1]))
    for cell in np.ndindex(change.shape[:-1]):
        found = paired_interval(change.values[cell])
        values[:, *cell] = [found[name] for name in names]
    whole = paired_interval(full.values)
    towards = whole["difference"] * np.array([1.0, -1.0])[:, None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(towards == 0, np.nan, values[0] / towards)
    coords = {name: patches[name].values for name in DIMS}
    ds = xr.Dataset({name: (DIMS, x) for name, x in zip(names, values, strict=True)}, coords)
    ds = ds.assign(p_fdr=(DIMS, controlled(values[3])), ratio=(DIMS, ratio), pairs=patches.sizes["pair"])
    ds = ds.assign(full=whole["difference"], full_low=whole["low"], full_high=whole["high"])
    words = "change of ln p(clean answer) − ln p(corrupted answer)"
    ds["difference"].attrs = {"units": "nat", "long_name": words, "formula": "mean of patched − unpatched"}
    ds["ratio"].attrs = {
        "units": "1",
        "long_name": "share of the whole difference",
        "formula": "mean change / mean (other − own)",
    }
    kept = {name: patches[name] for name in ("eigenvalue_min", "eigenvalue_max") if name in patches}
    return ds.assign(kept).assign_attrs(patches.attrs | {"schema": "patch effects"})
