#!/usr/bin/env bash
# From a fresh clone to an HF checkpoint: two clusters of two pipeline stages on this machine.
# Arguments, for example `--set dsx.training.steps=1000`, are passed on to the run.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

config=configs/quickstart.json
run=runs/quickstart

dsx prepare --deepspeed_config $config
dsx local --deepspeed_config $config --clusters 2 "$@"
dsx export --run $run --output $run/hf
dsx report --run $run
python launch/plain_loss.py --model $run/hf --run $run

cat <<END

run folder   $run  (metrics, logs, report.html)
checkpoint   $run/hf  (AutoModelForCausalLM.from_pretrained reads it)
wandb run    $run/wandb  (offline without a key: \`wandb sync\` uploads it)
go on with   ./launch/quickstart.sh --set dsx.training.steps=1000
END
