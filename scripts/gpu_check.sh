#!/usr/bin/env bash
# Checks and measures relume on a GPU, in under 8 minutes, with nothing installed but PyTorch, numpy, safetensors and
# tokenizers, and without a network. Options are those of gpu_check.py; the report is gpu_check.json in $OUT or here.
#
#     scripts/gpu_check.sh                    # on a machine with a GPU
#     scripts/gpu_check.sh --dry-run          # the same steps on a CPU, with tiny models, in a minute
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" "$root/scripts/gpu_check.py" "$@"
