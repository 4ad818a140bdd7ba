"""Print C code for what torch and bitsandbytes call of CUDA's libraries and the emulated device does not define.

    python stubs.py SITE_PACKAGES COMPILED_OBJECT ... > stubs.c

Each such function returns success and does nothing; calls of cuBLAS, which are products, are counted.
"""

import re
import subprocess
import sys
from pathlib import Path

ANSWERS = {
    "cublasCreate_v2": "int cublasCreate_v2(void **handle) { *handle = (void *)0x1000; return 0; }",
    "cublasLtCreate": "int cublasLtCreate(void **handle) { *handle = (void *)0x2000; return 0; }",
    "cublasGetMathMode": "int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }",
    "cublasGetPointerMode_v2": "int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }",
    "cublasLtGetVersion": "unsigned long cublasLtGetVersion(void) { return 130000; }",
    "cublasLtMatmulDescCreate": "int cublasLtMatmulDescCreate(void **made) { *made = (void *)0x3000; return 0; }",
    "cublasLtMatrixLayoutCreate": "int cublasLtMatrixLayoutCreate(void **made) { *made = (void *)0x4000; return 0; }",
    "cublasLtMatmulPreferenceCreate": "int cublasLtMatmulPreferenceCreate(void **made) "
    "{ *made = (void *)0x5000; return 0; }",
    "cublasLtMatmulAlgoGetHeuristic": "int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, "
    "void *a, void *b, void *c, void *d, void *preference, int wanted, void *algorithms, int *found) "
    "{ *found = 1; return 0; }",
    **{
        name: f'const char *{name}(int status) {{ return "emulated"; }}'
        for name in ("cublasGetStatusString", "cublasGetStatusName", "cublasLtGetStatusString")
    },
}


def symbols(library: Path, *options: str) -> set[str]:
    """The names of a library or object that `nm` prints, without their versions."""
    text = subprocess.run(["nm", *options, str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in text.splitlines() if line.strip()}


def main(packages: Path, objects: list[Path]) -> None:
    libraries = [*packages.glob("torch/lib/lib*cuda*.so"), *packages.glob("torch/lib/lib*nvrtc*.so")]
    libraries += packages.glob("bitsandbytes/libbitsandbytes_cuda130.so")
    wanted = set().union(*(symbols(library, "-D", "--undefined-only") for library in libraries))
    wanted = {name for name in wanted if re.match(r"(__)?(cuda|nccl|cublas)|cu[A-Z]", name)}
    defined = set().union(*(symbols(library, "--defined-only") for library in objects))
    print("static long calls;\nlong fake_blas_calls(void) { return calls; }")
    for name in sorted((wanted | ANSWERS.keys()) - defined):
        count = "calls++; " if name.startswith("cublas") else ""
        print(ANSWERS.get(name, f"int {name}(void) {{ {count}return 0; }}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
