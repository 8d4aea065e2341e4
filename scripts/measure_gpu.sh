#!/usr/bin/env bash
# Measure profile, multi_gpu, amp, workers, torch_compile, batch_size and peers on a GPU node that has torch, torchvision, numpy, psutil and Pillow, and nothing else.
# Usage: scripts/measure_gpu.sh [options of ddpm-lab run, for example --data /path/to/images --preset quick --minutes 25]
# Give absolute paths; without --minutes there is no time limit.
# The records end up in trace_output/ledger.jsonl; look at them elsewhere with: ddpm-lab figures --ledger ledger.jsonl
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
"$python" -m ddpm_lab check || true
"$python" -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "torch sees no GPU: nothing to measure here")'
if "$python" -c 'import pytest, hypothesis' 2>/dev/null; then
  # Only files with such tests: others need packages that are not here, and one that cannot be loaded would stop them all.
  grep -lZ 'mark\.gpu' tests/test_*.py | xargs -0 "$python" -m pytest -q -m gpu -p no:cacheprovider || echo "GPU tests failed: see above"
fi
# peers compares with denoising-diffusion-pytorch and diffusers where they are installed; the published code is always there.
exec "$python" -m ddpm_lab run profile multi_gpu amp workers torch_compile batch_size peers --device cuda "$@"
