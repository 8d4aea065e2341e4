#!/usr/bin/env bash
# On a machine with NVIDIA GPUs: checks, GPU tests, what only a GPU can show, then the measurements of the README.
#   scripts/gpu.sh [--minutes 10] [--data FOLDER] [--output-dir gpu_results] [--device cpu]
# Type it again: finished steps are skipped, and measurements go on. --device cpu is a dry run with a tiny network.
# It needs a Python ($PYTHON, .venv or python3) with torch, torchvision, numpy, psutil and Pillow; for the tests pytest
# and hypothesis. Results are in the output folder; what lies in the one beside it, OUTPUT-DIR.work, may be deleted.
set -uo pipefail
minutes=${MINUTES:-10} data=${DATA:-synthetic} device=cuda out=gpu_results
while (($#)); do
  case $1 in
    --minutes) minutes=${2:?is missing} ;;
    --data) data=${2:?is missing} && [[ $data == synthetic ]] || data=$(realpath "$data") ;;
    --device) device=${2:?is missing} ;;
    --output-dir) out=${2:?is missing} ;;
    *) echo "gpu.sh: unknown option $1: see the first lines of $0" >&2 && exit 2 ;;
  esac
  shift 2
done
which=$device-$(cksum <<<"$data" | cut -d ' ' -f 1) # steps are finished for a device and images
mkdir -p "$out/logs" "$out.work/finished-$which" && out=$(realpath "$out") && work=$out.work && cd "$(dirname "$0")/.." || exit 2
finished=$work/finished-$which images=$work/images-$which
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
python=${PYTHON:-python3} failed=() waiting=()
network=seed size=quick
if [[ $device == cpu ]]; then network=tiny size=smoke; fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
trap 'exit 130' INT # whatever a step makes of it
end=$(awk -v minutes="$minutes" 'BEGIN { print int(60 * minutes) }')
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
if [[ $device == cuda && $gpus == 0 ]]; then
  "$python" -m ddpm_lab check
  echo "gpu.sh: torch sees no GPU (see above): --device cpu tries the steps without one" >&2 && exit 2
fi
# step NAME SECONDS COMMAND...: run it for so many seconds, or as many as are left; its output is in logs/NAME.log.
step() {
  local name=$1 limit=$2 log=$out/logs/$1.log begun=$SECONDS left=$((end - SECONDS)) code=0
  shift 2
  printf '%4d s  %-20s ' "$SECONDS" "$name"
  if [[ -e $finished/$name ]]; then echo "finished before" && return; fi
  if ((left < 5)); then waiting+=("$name") && echo "no time left" && return; fi
  timeout --foreground -k 10 "$((limit < left ? limit : left))" "$@" >"$log" 2>&1 || code=$?
  case $code in
    0) touch "$finished/$name" && echo "ok, $((SECONDS - begun)) s" ;;
    124 | 137) waiting+=("$name") && echo "stopped after $((SECONDS - begun)) s: $log" ;;
    *) failed+=("$name") && echo "FAILED: $( (grep -E 'ailed|rror' "$log" || cat "$log") | tail -n 1) ($log)" ;;
  esac
}
lab() { step "$1" "$2" "$python" -m ddpm_lab "${@:3}" --device "$device" --data "$images"; }
step environment 60 "$python" -m torch.utils.collect_env
step check 60 "$python" -m ddpm_lab check
if "$python" -c 'import pytest, hypothesis' 2>/dev/null; then
  mapfile -t tests < <(grep -l 'mark\.gpu' tests/test_*.py) # others need packages that are not here
  step tests 180 "$python" -m pytest -q -m gpu -p no:cacheprovider -p no:benchmark "${tests[@]}"
fi
step images 600 "$python" -m ddpm_lab prepare "$data" "$images"
export TORCH_LOGS=cudagraphs,recompiles
lab train 200 train --network $network --no-probe --steps 20 --sample-every 10 --evaluate-every 10 --output-dir "$work/train-$which"
unset TORCH_LOGS
step attention 60 "$python" - "$device" <<'END'
import sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.benchmark import Timer
for shape in ((4, 64, 32), (1, 256, 256), (1, 16, 256)):  # heads, positions and width, in the networks seed and ddpm
    images = 128 if sys.argv[1] == "cuda" else 2
    q = torch.randn(images, *shape, device=sys.argv[1], dtype=torch.bfloat16, requires_grad=True)
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(kernel):
                timer = Timer("attention(q, q, q).sum().backward()", globals={"q": q, "attention": attention})
                print(shape, kernel.name, f"{timer.blocked_autorange().median * 1e6:.0f} us")
        except RuntimeError as error:
            print(shape, kernel.name, str(error).splitlines()[0])
END
# Each in an equal part of the time that is left, or five minutes: an H100 took a minute for a set of four formats.
questions=(torch_compile amp profile workers batch_size peers "peers --parts levers") jobs=() tried=0
if [[ $device == cpu ]]; then questions=("${questions[@]:0:6}"); fi
if ((gpus > 1)) || [[ $device == cpu ]]; then questions+=(multi_gpu exchange); fi
for question in "${questions[@]}"; do
  if [[ ! -e $finished/${network}_${question##* } ]]; then jobs+=("$question"); fi
done
for question in "${jobs[@]}"; do
  seconds=$(((end - SECONDS) / (${#jobs[@]} - tried++)))
  seconds=$((seconds < 300 ? 300 : seconds))
  # shellcheck disable=SC2086 # a question, and its option
  lab "${network}_${question##* }" $((seconds + 60)) run $question --network $network --preset "$size" \
    --output-dir "$work" --minutes "$(awk "BEGIN { print $seconds / 60 }")"
done
# When all have had their time, the next call measures more of each.
if ((${#waiting[@]} == 0)); then rm -f "$finished/${network}"_*; fi
cp "$work/trace_output/ledger.jsonl" "$out/" 2>/dev/null || echo "Nothing is measured yet."
echo "Failed: ${failed[*]:-none}. Not finished: ${waiting[*]:-none}${waiting:+ (type it again)}."
echo "To publish it, in a checkout with make setup: .venv/bin/ddpm-lab figures --publish --ledger $out/ledger.jsonl"
((${#failed[@]} + ${#waiting[@]} == 0))
