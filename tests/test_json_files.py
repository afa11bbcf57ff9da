"""What is damaged is said in one line, with the fix; lines that aren't whole are left out."""

from __future__ import annotations

import pytest

from dreamer_jax.errors import UserError
from dreamer_jax.json_files import read_lines, read_object


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b'{"step": 4', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[4]", "not a JSON object"),
        (b'{"a": 1}', "it has no 'step'"),
    ],
)
def test_damaged_objects(tmp_path, content, said):
    file = tmp_path / "summary.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"summary\.json is damaged: ") as error:
        read_object(file, "make it again", ("step",))
    assert said in str(error.value) and str(error.value).endswith("; make it again")


def test_whole_ones(tmp_path):
    (tmp_path / "a").write_bytes(b'{"step": 4, "b": null}')
    assert read_object(tmp_path / "a", needs=("step", "b")) == {"step": 4, "b": None}
    (tmp_path / "b").write_bytes(b'{"step": 1}\n5\n\xff\xfe\n{"step": 2}\n\n{"st')
    assert list(read_lines(tmp_path / "b")) == [{"step": 1}, {"step": 2}]
    assert list(read_lines(tmp_path / "none")) == []
