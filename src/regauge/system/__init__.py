"""The ground: processes, files, JSON, errors, words and the choices; it knows no run file."""
