# The functions of every job script of Slurm; the settings of the job are above them.

log() {
  printf '%s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

read_secret() { # variable file
  if [[ ! -r $2 ]]; then
    log "the secret $1 cannot be read from $2"
    exit 2
  fi
  export "$1=$(<"$2")"
}

# Every attempt is a line of a file, which requeued and resubmitted jobs share.
begin_attempt() {
  local count=0
  if [[ -e $logs/$job.attempts ]]; then
    count=$(wc -l <"$logs/$job.attempts")
  fi
  if ((count >= max_attempts)); then
    log "all attempts are used: $max_attempts"
    exit 75
  fi
  attempt=$((count + 1))
  log "attempt $attempt of $max_attempts on $SLURM_JOB_NODELIST" | tee -a "$logs/$job.attempts"
  export REGAUGE_ATTEMPT=$attempt
}

# The controller records why a job ends before it sends the signal.
find_end() {
  local record state restarts preempted started
  record=" $(scontrol --oneliner show job "$slurm_id") "
  state=${record#* JobState=} state=${state%% *}
  restarts=${record#* Restarts=} restarts=${restarts%% *}
  preempted=${record#* PreemptTime=} preempted=${preempted%% *}
  started=${record#* StartTime=} started=${started%% *}
  if [[ $state == RUNNING ]]; then
    echo limit
  elif ((restarts > ${SLURM_RESTART_COUNT:-0})); then
    echo requeue
  elif [[ $record == *" PreemptTime="* && $preempted != None && ! $preempted < $started ]]; then
    echo preemption
  else
    echo cancellation
  fi
}

submit_successor() {
  local options=(--parsable "--dependency=afterany:$slurm_id" "--output=$logs/$job.log")
  options+=("--comment=$comment&first=$job")
  if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    options+=("--array=$SLURM_ARRAY_TASK_ID")
  fi
  if successor=$(sbatch "${options[@]}" "$0" "$job"); then
    log "preempted without a requeue: job $successor continues after this one"
  else
    log "preempted without a requeue, and sbatch failed: submit the job again to resume"
  fi
}

handle_signal() {
  num_signals=$((num_signals + 1))
  if [[ -n $end ]]; then
    return
  fi
  end=$(find_end)
  log "stopped by Slurm: $end"
  if [[ $end == limit ]]; then
    scancel --signal=TERM "$slurm_id" || true
  elif [[ $end == preemption ]] && ((attempt < max_attempts && !is_stage)); then
    submit_successor
  fi
}

# A signal ends a `wait` early, so wait again. A step that has ended meanwhile is no child any more.
wait_for_step() { # process
  local before previous
  code=127
  while true; do
    before=$num_signals
    previous=$code
    code=0
    wait "$1" || code=$?
    if ((code == 127 || code < 0)); then
      code=$previous
      return
    fi
    if ((num_signals == before)); then
      return
    fi
  done
}

# A node that failed waits a moment before srun kills the others, so that they end with their codes.
run_nodes() { # options of srun
  local node='trap : TERM; "$@" && exit; code=$?; ((code == 143)) || sleep 5; exit "$code"'
  srun "$@" "--output=$logs/$job-$attempt-%n.log" bash -c "$node" bash "${node_command[@]}" &
  wait_for_step $!
  log "attempt $attempt ended with code $code"
}

is_restarted() {
  if ((attempt >= max_attempts)); then
    return 1
  fi
  [[ " $restart_codes " == *" $code "* ]] || ((is_elastic && code == 137))
}

# A signal may arrive after the end of the step that it ended.
check_end() {
  sleep 1 || true
  if [[ -z $end && $(find_end) != limit ]]; then
    handle_signal
  fi
}

# Run attempts on these nodes while a restart may help; other nodes and more time need a requeue.
run_attempts() { # options of srun
  run_nodes "$@"
  while is_restarted; do
    check_end
    if [[ -n $end || $code == 76 ]]; then
      break
    fi
    begin_attempt
    run_nodes "$@"
  done
  if ! is_restarted; then
    if [[ -n $successor ]]; then
      scancel "$successor"
    fi
  elif [[ -z $end || $end == limit ]]; then
    log "the job asks for a requeue"
    if scontrol requeue "$slurm_id"; then
      sleep 60 || true
    else
      log "Slurm did not requeue the job: submit it again to resume"
    fi
  fi
  exit "$code"
}

trap handle_signal TERM
