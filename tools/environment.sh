# Sourced by demo/run.sh and tests/run.sh: makes the project's own Python environment, once.
#
#   ensure_environment [EXTRA]    installs the project (with that extra) into .venv and puts it first on PATH
#
# It is kept, and made again only when pyproject.toml, the Python version, or what the C parts are
# built from has changed.

ensure_environment() {
  local extra="${1:-}" root python stamp
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  python="${PYTHON:-python3}"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "plsc needs Python 3.10 or newer; '$python' is $("$python" --version 2>&1); set PYTHON=..." >&2
    return 1
  }
  stamp="$({
    "$python" --version
    cat "$root/pyproject.toml" "$root/setup.py" "$root"/plsc/heads/kernels/*.[ch] "$root"/plsc/data/native/*.[ch]
  } | cksum | cut -d' ' -f1)"
  if [ ! -f "$root/.venv/plsc-$extra-$stamp" ] && [ ! -f "$root/.venv/plsc-dev-$stamp" ]; then
    echo "making the environment in .venv (once; torch is large, this takes some minutes)"
    if [ ! -x "$root/.venv/bin/python" ]; then
      # Debian splits venv off from python3; virtualenv is the same by way of pip.
      "$python" -m venv "$root/.venv" 2>/dev/null || {
        rm -rf "$root/.venv"
        "$python" -m pip install --quiet --user virtualenv && "$python" -m virtualenv --quiet "$root/.venv"
      } || return 1
    fi
    # Of pip's lines, those on downloads of megabytes show that it works; while it unpacks, it prints nothing.
    (
      set -o pipefail
      (while sleep 10 && kill -0 $$; do echo "  $(du -sm "$root/.venv" | cut -f1) MB in .venv"; done) 2>/dev/null &
      trap "kill $!" EXIT
      PYTHONUNBUFFERED=1 "$root/.venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        --editable "$root${extra:+[$extra]}" | sed -un \
        -e 's/^ *Downloading \(.*\/\)*\([^ /-]*\)[^ /]* (\([0-9.]* [MG]B\)).*/  downloading \2, \3/p' \
        -e 's/^Installing collected packages.*/  installing/p'
    ) || return 1
    rm -f "$root"/.venv/plsc-*
    touch "$root/.venv/plsc-$extra-$stamp"
  fi
  export PATH="$root/.venv/bin:$PATH"
}
