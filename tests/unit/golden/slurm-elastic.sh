#!/bin/bash
#SBATCH --job-name=ranker
#SBATCH --comment=regauge:processes=8&attempts=5&output=out/ranker&logs=out/ranker.slurm
#SBATCH --nodes=1-4
#SBATCH --no-kill
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --export=NONE
#SBATCH --open-mode=append
#SBATCH --output=out/ranker.slurm/%j.log

# A trap calls some functions, and values in single quotes are constants.
# shellcheck disable=SC2016,SC2329
set -eo pipefail
export SLURM_EXPORT_ENV=ALL
logs=out/ranker.slurm
max_attempts=5
can_requeue=1
restart_codes='75 76 143'
is_elastic=1
job=$SLURM_JOB_ID
num_signals=0 end='' is_running=1 planned_end=0
node_command=(
  /opt/venv/bin/python
  -m
  regauge
  train
  '/data/run file.toml'
)

# The functions of the template.

begin_attempt
run_attempts --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill --wait=0 --cpu-bind=none --open-mode=append
