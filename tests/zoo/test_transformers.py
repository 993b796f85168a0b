"""Architectures of transformers, tiny, as the zoo has them: every number is what brute force says."""

from functools import partial

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
from benchmarks.zoo import of_transformers, page
from benchmarks.zoo.case import case, measured

measured_quickly = partial(measured, differences=False)


@pytest.mark.parametrize("name", sorted(of_transformers.NETWORKS))
def test_a_network_of_transformers_is_what_brute_force_says(name):
    assert page.verdict(measured_quickly(case(f"transformers:{name}"))) == "right"
