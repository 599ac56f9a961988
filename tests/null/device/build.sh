#!/usr/bin/env bash
# build.sh PYTHON FOLDER: build the null CUDA device in FOLDER, for the CUDA build of torch that PYTHON has.
# CUDA's headers come from $CUDA_HOME (default /usr/local/cuda), from Triton and from torch's nvidia-* packages.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1
out=$2
mkdir -p "$out"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
include=(-I "${CUDA_HOME:-/usr/local/cuda}/include" -I "$site/triton/backends/nvidia/include")
for folder in "$site"/nvidia/*/include; do include+=(-I "$folder"); done
options=(-O1 -fPIC -w "${include[@]}")
g++ -std=c++17 "${options[@]}" -c "$here/runtime.cpp" -o "$out/runtime.o"
g++ -std=c++17 "${options[@]}" -c "$here/driver_symbols.cpp" -o "$out/driver_symbols.o"
gcc "${options[@]}" -c "$here/defaults.c" -o "$out/defaults.o"
g++ -shared -o "$out/libnullcuda.so" "$out"/runtime.o "$out"/driver_symbols.o "$out"/defaults.o -ldl -lpthread
g++ -std=c++17 "${options[@]}" -shared "$here/driver.cpp" -o "$out/libcuda.so.1" -ldl
ln -sf libcuda.so.1 "$out/libcuda.so"
