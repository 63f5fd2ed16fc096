#!/bin/bash
#SBATCH --job-name=ranker
#SBATCH --comment=regauge:usd_per_hour=43.92&price_date=2026-07-20&processes=8&attempts=3&output=out/ranker&logs=/shared/my%20logs&label.team=search%20%26%20ranking
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --gres=gpu:a100:8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --partition=gpu,long
#SBATCH --account=team
#SBATCH --qos=high
#SBATCH --constraint=a100&ib
#SBATCH --reservation=night
#SBATCH --export=NONE
#SBATCH --open-mode=append
#SBATCH --output="/shared/my logs/%j.log"
#SBATCH --mail-user=me@example.org
#SBATCH --nice=100
#SBATCH --overcommit

# A trap calls some functions, and values in single quotes are constants.
# shellcheck disable=SC2016,SC2329
set -eo pipefail
export SLURM_EXPORT_ENV=ALL
logs='/shared/my logs'
max_attempts=3
can_requeue=1
restart_codes='75 76 143'
is_elastic=0
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
export HF_HOME='/data/hf $cache'
module load cuda
[[ $REGAUGE_ATTEMPT -gt 1 ]] || echo "first attempt"
read_secret HF_TOKEN '/etc/my token'
run_attempts --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 --cpu-bind=none --cpus-per-task=96 --open-mode=append
