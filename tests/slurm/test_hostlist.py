import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.slurm.hostlist import expand, numbers

NAME = st.text("abcxyz-", min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("(null)", ()),
        ("dgx1", ("dgx1",)),
        ("dgx[1-3]", ("dgx1", "dgx2", "dgx3")),
        ("dgx[008-011,7],login", ("dgx008", "dgx009", "dgx010", "dgx011", "dgx7", "login")),
        ("r[1-2]n[01-02]x", ("r1n01x", "r1n02x", "r2n01x", "r2n02x")),
        ("a[1],b[2,4-5]", ("a1", "b2", "b4", "b5")),
        ("n[99-101]", ("n99", "n100", "n101")),
    ],
)
def test_lists_as_slurm_prints_them(text, names):
    assert expand(text) == names


@pytest.mark.parametrize("text", ["dgx[1-3", "dgx1]", "dgx[]", "dgx[a]", "a,,b", "dgx[3-]", "x[[1]]"])
def test_an_invalid_list_is_an_error(text):
    with pytest.raises(ValueError, match=r".+"):
        expand(text)


def test_tasks_of_an_array_may_have_a_step():
    assert numbers("1,3,11-19:4") == ["1", "3", "11", "15", "19"]


@given(st.lists(st.tuples(NAME, st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 3)), min_size=1))
def test_what_is_written_out_is_read_back(hosts):
    parts, names = [], []
    for prefix, found, width in hosts:
        wide = [f"{n:0{width}}" for n in found]
        parts.append(f"{prefix}[{','.join(wide)}]")
        names += [prefix + n for n in wide]
    assert expand(",".join(parts)) == tuple(names)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 5), st.integers(0, 5))
def test_dimensions_multiply(a, b, more_a, more_b):
    rows, columns = range(a, a + more_a + 1), range(b, b + more_b + 1)
    expected = tuple(f"r{i:02}c{j:02}" for i, j in itertools.product(rows, columns))
    assert expand(f"r[{a:02}-{rows[-1]:02}]c[{b:02}-{columns[-1]:02}]") == expected
