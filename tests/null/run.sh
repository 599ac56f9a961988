#!/usr/bin/env bash
# run.sh COMMAND...: run COMMAND on the null CUDA device that was built in the folder $HFUSION_NULL_CUDA.
# NULL_DEVICES=8 gives it eight devices.
set -euo pipefail
device=$(cd "${HFUSION_NULL_CUDA:?the folder in which the null CUDA device was built}" && pwd)
export HFUSION_NULL_CUDA=$device LD_PRELOAD=$device/libnullcuda.so LD_LIBRARY_PATH=$device TRITON_LIBCUDA_PATH=$device
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$@"
