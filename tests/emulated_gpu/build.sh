#!/bin/bash
# build.sh VENV: compile the emulated device for an environment with torch's CUDA build, into VENV/emulated_gpu.
set -e
here=$(cd "$(dirname "$0")" && pwd)
packages=$(echo "$(cd "$1" && pwd)"/lib/python3*/site-packages)
out=$1/emulated_gpu
headers=$packages/nvidia/cu13/include
mkdir -p "$out/include"
ln -sfn "$packages/triton/backends/nvidia/include/crt" "$out/include/crt"
for part in runtime collectives; do
    g++ -O1 -fPIC -std=c++17 -I "$headers" -I "$out/include" -c -o "$out/$part.o" "$here/$part.cpp"
done
"$1/bin/python" "$here/stubs.py" "$packages" "$out/runtime.o" "$out/collectives.o" > "$out/stubs.c"
gcc -O1 -fPIC -fno-builtin -w -c -o "$out/stubs.o" "$out/stubs.c"
# By this name torch finds the driver in it.
g++ -shared -Wl,-soname,libcuda.so.1 -o "$out/libemulated.so" "$out"/*.o
echo "built $out/libemulated.so"
