#!/bin/bash
# run.sh VENV COMMAND...: run a command of the environment (python, pytest) on the emulated device; README.md has the variables.
here=$(cd "$(dirname "$0")" && pwd)
venv=$(cd "$1" && pwd)
shift
export LD_PRELOAD=$venv/emulated_gpu/libemulated.so PATH=$venv/bin:$PATH
export PYTHONPATH=$PWD:$here/start${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TRITON_INTERPRET=${TRITON_INTERPRET:-1}
exec "$@"
