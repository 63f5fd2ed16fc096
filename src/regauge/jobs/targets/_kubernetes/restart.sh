# Runs a command again after exit codes that a restart may fix, as the operator cannot: it restarts
# a pod only after codes from 128 on. The launcher replaces the placeholders.
child=
stop=
trap 'stop=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT
for attempt in $(seq @ATTEMPTS@); do
  [ -z "$stop" ] || exit 143
  "$@" &
  child=$!
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
  done
  [ -z "$stop" ] || [ "$code" -eq 0 ] || exit 143
  case "$code" in
  @CODES@) echo "start $attempt of @ATTEMPTS@ ended with exit code $code" >&2 ;;
  143) exit 143 ;;
  *) break ;;
  esac
done
[ "$code" -lt 128 ] || code=1
exit "$code"
