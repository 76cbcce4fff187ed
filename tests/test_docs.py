"""The documents: examples run as they stand, and every diagnostic is explained."""

import re
from pathlib import Path

import pytest

import qed_probe as qp

ROOT = Path(__file__).parents[1]


def test_the_readmes_python_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in [*blocks, *blocks]:  # in an empty folder, and once more after itself
        exec(compile(block, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert len(re.findall(r"answer +1\.51", out)) == 2
    assert out.endswith("0 torch.Size([1, 512, 3])\n")
    assert not Path("run.zarr").exists()  # which the commands above the example have made


def test_every_diagnostic_is_explained() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "analyses.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert ", ".join(headings).split(", ") == [*(row.name for row in qp.DIAGNOSTICS), "summary", "difference", "replay", "heads"]


def test_every_file_has_its_line_in_the_readme() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The tree")[2]
    files = [*(ROOT / "qed_probe").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").glob("*.md")]
    named = [path for path in files if path.name != "__init__.py"]
    assert named
    assert [path for path in named if f"`{path.name}`" not in tree and f"/{path.name}`" not in tree] == []
