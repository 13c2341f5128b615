"""One cluster of twelve hosts for all tests here; where there can be none, they are skipped with the reason."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

import testbed


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[testbed.Cluster]:
    reason = testbed.missing()
    if reason is not None:
        pytest.skip(reason)
    cluster = testbed.Cluster(Path(tempfile.mkdtemp(prefix="zerorun-hosts-")), 12)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(whole_cluster: testbed.Cluster) -> Iterator[testbed.Cluster]:
    """The cluster, and afterwards the same with everything mended."""
    yield whole_cluster
    whole_cluster.heal()
