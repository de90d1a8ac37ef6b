"""Counter-based noise of sampling: Philox4x32-10 turned into Gumbel noise per token id.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The key is the request's seed,
the counter the output position and the id, so an id's noise depends on nothing else.
plugins_cpu/kernels/noise.h computes the same.
"""

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: np.ndarray, seed: int) -> np.ndarray:
    """uint32 [n, 4] counters -> uint32 [n, 4] random words, keyed by the 64-bit seed (low word first)."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(_ROUNDS):
        product0, product1 = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0 = product1 >> np.uint64(32) ^ c1 ^ np.uint64(key[0])
        c2 = product0 >> np.uint64(32) ^ c3 ^ np.uint64(key[1])
        c1, c3 = product1 & low, product0 & low
        key = [(k + w) & 0xFFFFFFFF for k, w in zip(key, _WEYL, strict=True)]
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def gumbel_noise(seed: int, output_position: int, vocab_size: int) -> np.ndarray:
    """float32 [vocab_size]: -log(-log(u)), u = ((word >> 9) + 0.5) / 2^23.

    The word of an id is output word id % 4 of counter (id // 4, output_position, 0, 0).
    """
    blocks = -(-vocab_size // 4)
    counter = np.zeros((blocks, 4), dtype=np.uint32)
    counter[:, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, 1] = output_position
    words = philox4x32(counter, seed).reshape(-1)[:vocab_size]
    uniform = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    return np.asarray(-np.log(-np.log(uniform)))
