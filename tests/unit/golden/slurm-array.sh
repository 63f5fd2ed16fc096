#!/bin/bash
#SBATCH --job-name=embed
#SBATCH --comment=regauge:processes=1&attempts=3&logs=embed.slurm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --array=0-2
#SBATCH --no-requeue
#SBATCH --export=NONE
#SBATCH --open-mode=append
#SBATCH --output=embed.slurm/%A_%a.log

# A trap calls some functions, and values in single quotes are constants.
# shellcheck disable=SC2016,SC2329
set -eo pipefail
export SLURM_EXPORT_ENV=ALL
logs=embed.slurm
max_attempts=1
can_requeue=0
restart_codes='75 76 143'
is_elastic=0
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
num_signals=0 end='' is_running=1 planned_end=0
node_command=(
  /opt/venv/bin/python
  -m
  regauge
  predict
  /data/run.toml
  predict.job_count=3
  "predict.job_index=$SLURM_ARRAY_TASK_ID"
)

# The functions of the template.

begin_attempt
run_attempts --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 --cpu-bind=none --cpus-per-task=4 --open-mode=append
