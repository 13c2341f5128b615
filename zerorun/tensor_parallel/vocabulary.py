"""Checks of token ids and labels where the vocabulary is divided: no rank alone can tell that one is outside of it."""

from __future__ import annotations

import torch

from ..distributed.device import on_host
from ..errors import VocabularyError


def check_inside(indices: torch.Tensor, vocabulary: int, what: str, ignored: int | None = None) -> None:
    """Raise VocabularyError unless all ``indices``, but those that are ``ignored``, are 0 .. ``vocabulary`` - 1.

    On a device, and in a compiled function, the program does not wait for the answer: an assertion of torch fails later, as
    for a whole embedding.
    """
    if indices.is_meta:
        return
    fits = (indices >= 0) & (indices < vocabulary)
    if ignored is not None:
        fits = fits | (indices == ignored)
    remedy = f"there are 0 to {vocabulary - 1}. Remedy: a vocabulary as large as the tokenizer's"
    if ignored is not None:
        remedy += f", and {ignored} for what does not count"
    if not on_host(indices) or torch.compiler.is_compiling():
        torch._assert_async(fits.all(), f"{what} outside the vocabulary: {remedy}.")
    elif not fits.all():
        raise VocabularyError(f"{what} {indices[~fits].flatten()[:3].tolist()} outside the vocabulary: {remedy}.")
