#!/usr/bin/env bash
# One curve, from a clone and the tools beside it to the picture; started again, it goes on where it stopped:
#   recipes/SmolLM2-135M-Instruct/curve.sh grpo|s_grpo|t_spmo|a_star_po [options of the recipe]
# PYTHON: the interpreter (.venv/bin/python of `make test`). SHARED: where tools/ and data/ are (../shared).
# MODEL: the base's folder or Hub id; built by the shared tool where it is not set. RUNS: where everything goes (runs).
set -euo pipefail
cd "$(dirname "$0")/../.."
here=recipes/SmolLM2-135M-Instruct
python=${PYTHON:-.venv/bin/python} shared=${SHARED:-../shared} runs=${RUNS:-runs}
method=${1:?grpo, s_grpo, t_spmo or a_star_po}
shift
case $method in
grpo | t_spmo | a_star_po) command=${method//_/-} config=$here/$method/config_svamp_from_sft.yaml ;;
s_grpo) command=grpo config=$here/grpo/config_svamp_s_grpo_from_sft.yaml ;;
*) echo "error: $method is none of grpo, s_grpo, t_spmo, a_star_po" >&2; exit 2 ;;
esac
data=$shared/data/svamp/SVAMP.json
model=${MODEL:-$runs/smollm2}
if [ -z "${MODEL:-}" ] && [ ! -e "$model" ]; then "$python" "$shared/tools/get_smollm2.py" "$model"; fi
common=(--accelerate_config cpu --dataset "$data" --resume_from_checkpoint auto)
"$python" -m trl_fsdp_qlora sft --config $here/sft/config_svamp.yaml "${common[@]}" --model_name_or_path "$model" \
    --output_dir "$runs/smollm2-svamp-sft"
case " $* " in *" --output_dir"*) ;; *) set -- --output_dir "$runs/smollm2-svamp-$method" "$@" ;; esac
"$python" -m trl_fsdp_qlora "$command" --config "$config" "${common[@]}" --model_name_or_path "$runs/smollm2-svamp-sft" "$@"
