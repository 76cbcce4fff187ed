"""Prompts from files: what is read, and what is refused with its place."""

import json
import os
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.models.tokenizer import ByteTokenizer
from qed_probe.tasks import Prompt, check_prompts, file_prompts, open_ids, text_prompts, token_prompts
from qed_probe.tasks.prompts import LazyPrompts
from qed_probe.tasks.survey import survey


class Utf8:
    """Bytes as ids, written out here so that these tests need no model."""

    def encode(self, text: str, /) -> NDArray[np.int64]:
        return np.array(list(text.encode()), np.int64)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def saved(path: Path, array: object) -> Path:
    np.save(path, np.asarray(array), allow_pickle=True)
    return path


def ids(prompts: Sequence[Prompt]) -> list[list[int]]:
    return [prompt.tokens.tolist() for prompt in prompts]


def test_texts_become_int64_ids() -> None:
    prompts = text_prompts(["ab", "é"], Utf8())
    assert ids(prompts) == [[97, 98], [0xC3, 0xA9]]
    assert all(prompt.tokens.dtype == np.int64 for prompt in prompts)


def test_a_prompt_a_line_and_only_line_feeds_end_lines(tmp_path: Path) -> None:
    content = "\N{BYTE ORDER MARK}one\r\ntwo\u2028still two\nthree".encode()
    prompts = file_prompts(write(tmp_path / "p.txt", content), Utf8())
    assert [bytes(p.tokens.astype(np.uint8)).decode() for p in prompts] == ["one", "two\u2028still two", "three"]
    assert ids(file_prompts(write(tmp_path / "q.txt", b"a\nb\n"), Utf8())) == [[97], [98]]


def test_a_last_line_ends_as_the_others_do(tmp_path: Path) -> None:
    assert ids(file_prompts(write(tmp_path / "p.txt", b"a\r\nb\r\n"), Utf8())) == [[97], [98]]


def test_lines_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "p.txt", b"".join(b"%d" % (index % 10) * 10_000 + b"\n" for index in range(300)))
    tracemalloc.start()
    prompts = file_prompts(path, ByteTokenizer())
    assert [int(prompts[index].tokens[0]) - 48 for index in (0, 299, -1, 123)] == [0, 9, 9, 3]
    assert tracemalloc.get_traced_memory()[1] < 1_000_000  # of 3 MB, and of 24 MB of ids
    tracemalloc.stop()
    write(path, path.read_bytes().replace(b"3", b"x"))
    assert chr(prompts[123].tokens[0]) == "x"
    path.unlink()
    with pytest.raises(InputError, match=r"p\.txt.*no such file"):
        prompts[0]


def test_lines_of_a_pipe_are_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write, args=(tmp_path / "pipe", b"one\ntwo\n"))
    writer.start()
    prompts = file_prompts(tmp_path / "pipe", Utf8())
    writer.join()
    assert ids(prompts) == ids(prompts) == [[*b"one"], [*b"two"]]


def test_lazy_prompts_are_a_sequence() -> None:
    prompts = LazyPrompts(5, lambda index: Prompt(np.array([index])))
    assert len(prompts) == 5
    assert ids(prompts) == [[0], [1], [2], [3], [4]]
    assert prompts[-1].tokens.tolist() == [4]
    assert ids(prompts[1:4]) == [[1], [2], [3]]
    assert ids(prompts[::-2][1:]) == [[2], [0]]
    with pytest.raises(IndexError):
        prompts[5]


def test_a_fingerprint_is_of_values_alone() -> None:
    one = Prompt(np.array([1, 2, 3]), np.array(["a", "a", "b"]))
    assert one.fingerprint == Prompt(np.array([1, 2, 3], np.int32), np.array(["a", "a", "b"], "<U9")).fingerprint
    others = [Prompt(one.tokens), Prompt(one.tokens[:2], np.array(["a", "b"])), Prompt(one.tokens, np.array(["a", "b", "b"]))]
    others += [Prompt(np.array([1, 2, 4]), one.roles), Prompt(one.tokens, np.array(["a", "a", "c"]))]
    assert len({prompt.fingerprint for prompt in (one, *others)}) == 6


def test_jsonl_holds_texts_and_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", b'{"text": "a\\nb", "source": 1}\n{"tokens": [5, 300, 0]}\n')
    assert ids(file_prompts(path, Utf8())) == [[97, 10, 98], [5, 300, 0]]


def test_ids_in_jsonl_need_no_tokenizer(tmp_path: Path) -> None:
    assert ids(file_prompts(write(tmp_path / "p.jsonl", b'{"tokens": [1, 2]}'), None)) == [[1, 2]]


@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i4", "i8", "u2"])
def test_arrays_of_ids(tmp_path: Path, dtype: str) -> None:
    assert ids(token_prompts(saved(tmp_path / "a.npy", np.array([3, 1, 4], dtype)), 5)) == [[3, 1, 4]]
    rows = np.asfortranarray(np.array([[3, 1, 4], [1, 0, 2]], dtype))
    assert ids(token_prompts(saved(tmp_path / "b.npy", rows), 5)) == [[3, 1, 4], [1, 0, 2]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", b"", "none in .*p.txt"),
        ("p.txt", b"one\n\nthree\n", "empty prompt in .*p.txt, line 2"),
        ("p.txt", b"\n\none\n\n", "empty prompt in .*p.txt, line 1"),
        ("p.txt", b"\r\n\n", "expected at least one prompt, found none in .*p.txt"),
        ("p.txt", b"one\ntwo \xff\n", "byte 0xff in .*p.txt, line 2"),
        ("p.jsonl", b'{"text": "a"}\nhello\n', "no JSON in .*p.jsonl, line 2"),
        ("p.jsonl", b'{"text": "a"}\n\n{"text": "b"}', "no JSON in .*p.jsonl, line 2"),
        ("p.jsonl", b"[" * 100_000, "no JSON in .*p.jsonl, line 1"),
        ("p.jsonl", b'{"prompt": "a"}', 'found {"prompt": "a"} in .*p.jsonl, line 1'),
        ("p.jsonl", b'["text"]', "line 1"),
        ("p.jsonl", b'{"text": 5}', 'found {"text": 5} in .*line 1'),
        ("p.jsonl", b'{"text": "a", "tokens": [1]}', "both in .*line 1"),
        ("p.jsonl", b'{"text": ""}', "empty prompt in .*line 1"),
        ("p.jsonl", b'{"tokens": []}', "empty prompt in .*line 1"),
        ("p.jsonl", b'{"tokens": [1, 2.0]}', "found 2.0 at token 1 in .*line 1"),
        ("p.jsonl", b'{"tokens": [true]}', "found true at token 0 in .*line 1"),
        ("p.jsonl", b'{"tokens": [1, -1]}', "found -1 at token 1 in .*line 1"),
        ("p.jsonl", b'{"tokens": [9223372036854775808]}', "found 9223372036854775808 at token 0"),
        ("p.jsonl", b'{"tokens": "12"}', "line 1"),
        ("p.jsonl", b'{"text": "\\ud800"}', "lone surrogate in .*line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        file_prompts(write(tmp_path / name, content), Utf8())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ([1.0, 2.0], "float64"),
        ([True], "bool"),
        (3, r"shape \(\)"),
        ([[[1]]], r"shape \(1, 1, 1\)"),
        ([], "float64"),
        (np.zeros(0, np.int64), "none in"),
        (np.zeros((3, 0), np.int64), "none in"),
        (np.array([1, "a"], object), "Python objects"),
        (np.array([1, 2], "m8[s]"), "timedelta64"),
        ([4, 5], "from 0 to 4.*found 5 in prompt 1, token 1"),
        ([[0, 0], [0, -1]], "found -1 in prompt 2, token 1"),
        (np.array([2**64 - 1], np.uint64), "prompt 1, token 0"),
    ],
)
def test_a_bad_array_is_refused(tmp_path: Path, array: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        token_prompts(saved(tmp_path / "a.npy", array), 5)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"PK\x03\x04", b"\x93NUMPY\x01\x00v\x00{", b"\x93NUMPY\x01\x00v\x00{" + b"(" * 117, b"\x80\x04K\x01."],
)
def test_a_file_that_is_no_array_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match=r"a\.npy"):
        open_ids(write(tmp_path / "a.npy", content))


def test_a_truncated_array_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.arange(1000))
    write(path, path.read_bytes()[:500])
    with pytest.raises(InputError, match=r"a\.npy"):
        token_prompts(path, 1000)


@pytest.mark.parametrize("read", [lambda path: file_prompts(path, Utf8()), lambda path: token_prompts(path, 5)])
def test_missing_files_and_directories_are_named(tmp_path: Path, read: Callable[[Path], Sequence[Prompt]]) -> None:
    with pytest.raises(InputError, match=r"absent.*no such file"):
        read(tmp_path / "absent")
    with pytest.raises(InputError, match="is a directory"):
        read(tmp_path)


def test_text_needs_a_text_and_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one prompt"):
        text_prompts([], Utf8())
    with pytest.raises(InputError, match="empty prompt in text 2"):
        text_prompts(["a", ""], Utf8())
    with pytest.raises(InputError, match="lone surrogate in text 1"):
        text_prompts(["\udcff"], Utf8())
    with pytest.raises(InputError, match=r"no tokenizer.*line 1"):
        file_prompts(write(tmp_path / "p.jsonl", json.dumps({"text": "a"}).encode()), None)


def test_ids_beyond_the_vocabulary_are_named() -> None:
    prompts = [Prompt(np.array([0, 1])), Prompt(np.array([0, 7]))]
    check_prompts(prompts, 8)
    with pytest.raises(InputError, match=r"from 0 to 6.*found 7 in prompt 2, token 1"):
        check_prompts(prompts, 7)


def test_no_prompts_and_prompts_without_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="at least one prompt, found none"):
        check_prompts([], 8)
    with pytest.raises(InputError, match="found none in prompt 2"):
        check_prompts([Prompt(np.array([1])), Prompt(np.array([], np.int64))], 8)


def test_a_fingerprint_tells_answers_details_and_roles_apart() -> None:
    ids = np.array([5, 0, 0])
    prompts = [
        Prompt(ids),
        Prompt(ids, answer=slice(1, 3)),
        Prompt(ids, details={"depth": 0.1}),
        Prompt(ids, details={"depth": 0.9}),
        Prompt(ids[:1], np.array([""])),
        Prompt(ids[:1]),
    ]
    assert len({prompt.fingerprint for prompt in prompts}) == len(prompts)


def test_ids_of_another_type_are_refused() -> None:
    with pytest.raises(InputError, match="expected int64 token ids, found int32 in prompt 1"):
        check_prompts([Prompt(np.zeros(3, np.int32))], 256)


def test_roles_are_one_a_token() -> None:
    with pytest.raises(InputError, match="prompt 1: expected 2 roles, one a token, found 1"):
        check_prompts([Prompt(np.array([1, 2]), np.array(["a"]))], 8)


def test_a_survey_keeps_what_each_prompt_has() -> None:
    prompts = [
        Prompt(np.array([1, 2])),
        Prompt(np.array([3]), np.array(["a"]), details={"x": 5.0}),
        Prompt(np.array([3]), answer=slice(0, 1), details={"y": 6.0, "x": 7.0}),
    ]
    found = survey(prompts, 8)
    assert found.lengths.tolist() == [2, 1, 1]
    assert found.fingerprints.tolist() == [prompt.fingerprint for prompt in prompts]
    np.testing.assert_array_equal(found.details["x"], [np.nan, 5, 7])
    np.testing.assert_array_equal(found.details["y"], [np.nan, np.nan, 6])
    assert (found.roles, found.answers) == (True, True)
    plain = survey(prompts[:1], 8)
    assert (plain.roles, plain.answers, plain.details) == (False, False, {})


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b"\r\n\n\r\n"])
def test_empty_lines_at_the_end_are_ignored(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "p.txt").write_bytes(b"one\n \ntwo" + end)
    prompts = file_prompts(tmp_path / "p.txt", Utf8())
    assert [bytes(prompt.tokens.tolist()) for prompt in prompts] == [b"one", b" ", b"two"]
