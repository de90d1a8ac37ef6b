"""Times linear for few tokens, as bench_linear_many.py does: python bench_linear_few.py [--schemes bf16 q4_1 fp8]."""

from bench_linear_many import SHAPES, arguments_of, measure_all

if __name__ == "__main__":
    given = arguments_of(__doc__ or "", [1, 8, 16, 32, 64])
    # with the vocabulary of Llama 3.1 8B, and SmolLM2 135M's largest linear
    measure_all(given.schemes, (*SHAPES, (128256, 4096), (1536, 576)), given.tokens, given.most)
