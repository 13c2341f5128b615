"""How it is told what differs between the configurations and models of two ranks."""

from __future__ import annotations

import pytest

from zerorun.model_setup.same_model import difference

CONFIG = ["a.lr = 0.1  (file)", "batch = 8  (derived)", "micro = 4  (file)"]
MODEL = ["w (2, 3) torch.float32 True", "v (3,) torch.float32 True", "group 0 of SGD: {'lr': 0.1}"]


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (CONFIG, ["a.lr = 0.2  (file)", *CONFIG[1:]], "'a.lr = 0.2  (file)' instead of 'a.lr = 0.1  (file)'"),
        (CONFIG, ["a.clip = 0.1  (file)", *CONFIG], "'a.clip = 0.1  (file)', which rank 0 has not, or as the default"),
        (CONFIG, CONFIG[1:], "without 'a.lr = 0.1  (file)', or with the default"),
        (
            CONFIG,
            [CONFIG[0], "batch = 4  (derived)", "micro = 2  (file)"],
            "'micro = 2  (file)' instead of 'micro = 4  (file)', 'batch = 4  (derived)' instead of 'batch = 8  (derived)'",
        ),
        (
            MODEL,
            [MODEL[0], "new (4,) torch.float32 True", *MODEL[1:]],
            "'new (4,) torch.float32 True', which rank 0 has not, ",
        ),
        (MODEL, [*MODEL[:2], "group 0 of AdamW: {}"], "'group 0 of AdamW: {}' instead of \"group 0 of SGD: {'lr': 0.1}\""),
        (MODEL, [MODEL[1], MODEL[0], MODEL[2]], f"{MODEL[1]!r} instead of {MODEL[0]!r}"),
    ],
)
def test_what_differs_is_told_by_its_name(ours: list[str], theirs: list[str], told: str) -> None:
    """Not by the first line that differs: what one has more moves all that follow."""
    assert difference(ours, theirs, "rank 0").startswith(told)
