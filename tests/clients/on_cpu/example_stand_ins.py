"""What DeepSpeed's examples find instead of GPUs, of torchvision and of a hub: CPUs, and random data made here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WORDS = [f"word{number}" for number in range(64)]
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


def install(example: str) -> None:
    """Put the stand-ins where the example looks for them, in this process, if it is one that trains."""
    if "RANK" not in os.environ:
        return
    torch.cuda.set_device = lambda device: None
    if example == "HelloDeepSpeed":
        _without_hub()
        return
    datasets, models = _module("torchvision.datasets", CIFAR10=CIFAR10), _module("torchvision.models", AlexNet=AlexNet)
    models.vgg19 = AlexNet  # type: ignore[attr-defined]  # imported by the example, and not used
    transforms = _module("torchvision.transforms", **{kind.__name__: kind for kind in TRANSFORMS})
    _module("torchvision", datasets=datasets, models=models, transforms=transforms)


def _module(name: str, **contents: Any) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(contents, __path__=[])
    return module


# -- torchvision -------------------------------------------------------------------------------------------------


class CIFAR10(Dataset[tuple[Any, int]]):
    """64 random images (16 for tests) of 3 x 32 x 32 bytes, each with the number of its class."""

    def __init__(self, root: str, train: bool, download: bool, transform: Callable[[Any], Any]) -> None:
        # Each class comes: the example divides by how often it has seen each.
        self._labels, generator = torch.arange(64 if train else 20) % 10, torch.Generator().manual_seed(int(train))
        self._images = torch.randint(0, 256, (len(self._labels), 3, 32, 32), generator=generator, dtype=torch.uint8)
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self._transform(self._images[number]), int(self._labels[number])


class Compose:
    """One transform after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self._transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self._transforms:
            image = transform(image)
        return image


class ToTensor:
    """Bytes to numbers between 0 and 1."""

    def __call__(self, image: Tensor) -> Tensor:
        return image.float() / 255


class Normalize:
    """Less the mean, and divided by the deviation, of each channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self._mean) / self._std


class Resize:
    """The image [channels, height, width], as large as asked for, by repetition of points."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, image: Tensor) -> Tensor:
        return nn.functional.interpolate(image[None], self._size)[0]


class CenterCrop:
    """The middle of the image."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, image: Tensor) -> Tensor:
        first = (image.shape[-1] - self._size) // 2
        return image[..., first : first + self._size, first : first + self._size]


class AlexNet(nn.Module):
    """A small network with the parts of torchvision's of this name, for images of 3 x 224 x 224."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(8, 16, kernel_size=5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(16 * 36, 32), nn.ReLU(inplace=True), nn.Linear(32, num_classes)
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.avgpool(self.features(images))
        return self.classifier(features.flatten(1))


TRANSFORMS = (Compose, ToTensor, Normalize, Resize, CenterCrop)

# -- the hub -----------------------------------------------------------------------------------------------------


def _without_hub() -> None:
    """Let every data set be lines of random words, and every tokenizer one that knows these words."""
    import datasets
    import pytz
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    def lines(*args: Any, **kwargs: Any) -> Any:
        numbers = torch.randint(0, len(WORDS), (32, 20), generator=torch.Generator().manual_seed(5))
        return datasets.Dataset.from_dict({"text": [" ".join(WORDS[number] for number in row) for row in numbers]})

    def tokenizer(*args: Any, **kwargs: Any) -> Any:
        words = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
        made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)

    class OneDay(tzinfo):
        """Ranks name their folder by the second in which they come by; here all seconds of a day are the same."""

        def fromutc(self, time: datetime) -> datetime:
            return time.replace(hour=0, minute=0, second=0)

    pytz.timezone = lambda name: OneDay()
    datasets.load_dataset = lines
    transformers.AutoTokenizer.from_pretrained = tokenizer
