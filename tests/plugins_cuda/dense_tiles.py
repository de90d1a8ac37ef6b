"""m64 tiles of bf16 weights made on the weight's device: numpy would take minutes for large ones."""

import torch


def pack_dense(weight: torch.Tensor) -> torch.Tensor:
    """Flat bf16 tensor in layout m64 of a bf16 weight [n, k], as castiron.plugins_cuda.layouts.pack."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % 64, 0, -n % 64))
    tiles = padded.view(padded.shape[0] // 64, 64, padded.shape[1] // 64, 8, 8).transpose(1, 2)
    row, place = torch.arange(64, device=weight.device)[:, None], torch.arange(8, device=weight.device)
    return tiles[:, :, row, place ^ (row & 7)].reshape(-1)
