"""An array of all numbers but a few equals the list of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendit.data.row_arrays import Complement


@given(st.integers(1, 60), st.sets(st.integers(0, 59)), st.sampled_from([np.int32, np.int64]), st.data())
def test_they_are_those_of_the_list(size, without, dtype, data):
    without = np.array(sorted(number for number in without if number < size), dtype)
    listed, found = np.setdiff1d(np.arange(size), without), Complement(size, without)
    assert len(found) == len(listed) and found[:].tolist() == listed.tolist() and found[:].dtype == np.int64
    some = data.draw(st.slices(len(listed)))
    assert found[some].tolist() == listed[some].tolist()
    assert [found[place] for place in range(-len(listed), len(listed))] == [*listed.tolist(), *listed.tolist()]
    places = np.array(data.draw(st.lists(st.integers(0, max(0, len(listed) - 1)))) if len(listed) else [], np.int64)
    assert found[places].tolist() == listed[places].tolist()
    ends = np.arange(size + 1)
    assert found.searchsorted(ends).tolist() == np.searchsorted(listed, ends).tolist()
    with pytest.raises(IndexError):
        found[len(listed)]
