"""Convolutional models: a ResNet-50 of any width (He et al. 2015), and a U-Net (Ronneberger et al. 2015)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, with a skip."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.spatial = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * inner)
        self.activation = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * inner:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.norm1(self.reduce(x)))
        inner = self.activation(self.norm2(self.spatial(inner)))
        return self.activation(self.norm3(self.expand(inner)) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-50 at width 64: stages of 3, 4, 6 and 3 bottlenecks."""

    def __init__(self, width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks, channels = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            inner = width * 2**stage
            for i in range(count):
                blocks.append(Bottleneck(channels, inner, 2 if stage and not i else 1))
                channels = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(images), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class UNet(nn.Module):
    """Down and up again, with skips to equal sizes."""

    def __init__(self, width: int = 16, depth: int = 3, num_classes: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        before = [3, *widths[:-1]]
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip(before, widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(self._double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def _double(self, before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        skips, x = [], images
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips[:-1]), strict=True):
            x = join(torch.cat((skip, up(x)), dim=1))
        return self.head(x)


def classified(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(batch["images"])
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), logits.shape[0]


def pictures(batch: int, size: int, *, per_pixel: bool = False) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(batch)
    shape = (batch, size, size) if per_pixel else (batch,)
    return {
        "images": torch.randn(batch, 3, size, size, generator=draw),
        "labels": torch.randint(0, 4, shape, generator=draw),
    }
