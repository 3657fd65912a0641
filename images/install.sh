#!/bin/sh
# One step of images/Dockerfile:
#   install.sh torchvision keep | wheel VERSION [cpu|cuNNN] | source VERSION [FOLDER]
#   install.sh packages FILE
# torch is never replaced: its build is read before and after, and a step that changes it fails.
set -eu

say() { echo "launcher: $*"; }
fail() { say "$*" >&2; exit 1; }

python=$(command -v python3 || command -v python) || fail "this image has no Python"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
export PIP_BREAK_SYSTEM_PACKAGES=1 # the image is the environment; there is no other to protect
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST; do
  eval "value=\${$name:-}"
  [ -n "$value" ] || unset "$name"
done
if [ -f /opt/launcher/ca.crt ]; then export PIP_CERT=/opt/launcher/ca.crt; fi

# The version and git commit of the installed torch, read without importing it.
torch_build() {
  "$python" -c '
import importlib.util, os, re
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin:
    text = open(os.path.join(os.path.dirname(spec.origin), "version.py")).read()
    print(" ".join(re.findall(r"^(?:__version__|git_version)\b[^=\n]*=\s*(\S+)", text, re.M)))'
}

# The version as pip reports it, which may be spelled differently from torch.__version__: nv25.1 for nv25.01.
pip_version() { "$python" -m pip show "$1" 2>/dev/null | sed -n 's/^Version: //p'; }

torchvision_wheel() { # VERSION VARIANT
  PIP_CONSTRAINT='' "$python" -m pip uninstall -y torchvision || say "no torchvision that pip could remove"
  if [ "$2" != cpu ]; then
    PIP_CONSTRAINT='' "$python" -m pip install --no-deps "torchvision==$1"
    if [ -z "$2" ] || "$python" -c 'import torchvision'; then return; fi
    say "that wheel does not fit this torch; trying the one for $2"
  fi
  PIP_CONSTRAINT='' PIP_EXTRA_INDEX_URL='' "$python" -m pip install --no-deps --force-reinstall \
    --index-url "https://download.pytorch.org/whl/$2" "torchvision==$1+$2"
}

torchvision_source() { # VERSION FOLDER
  "$python" -m pip --version
  source=$2
  if [ -z "$source" ]; then
    source=/tmp/vision
    git clone --depth 1 --branch "v$1" https://github.com/pytorch/vision "$source"
  fi
  PIP_CONSTRAINT='' "$python" -m pip uninstall -y torchvision || say "no torchvision that pip could remove"
  cuda=0
  if command -v nvcc >/dev/null; then cuda=1; fi
  # PYTORCH_VERSION is unset: NVIDIA's value lacks the suffix of the installed build, so setup.py would require another torch.
  # FORCE_CUDA: no GPU is visible in a build. No build isolation: setup.py must see this image's torch.
  (cd "$source" && env -u PYTORCH_VERSION PIP_CONSTRAINT='' FORCE_CUDA=$cuda BUILD_VERSION="$1" MAX_JOBS="${MAX_JOBS:-8}" \
    "$python" -m pip install --no-deps --no-build-isolation -v .)
  [ -n "$2" ] || rm -rf "$source"
}

packages() { # FILE
  grep -qv '^[[:space:]]*\(#.*\)\{0,1\}$' "$1" || { say "no extra packages"; return; }
  # The base's own constraints, if any, without its lines for torch and torchvision, which are pinned to what is installed.
  constraints=$(mktemp)
  if [ -n "${PIP_CONSTRAINT:-}" ] && [ -f "$PIP_CONSTRAINT" ]; then
    grep -v -i -E '^[[:space:]]*(torch|torchvision)[[:space:]]*(@|[=<>!~])' "$PIP_CONSTRAINT" >"$constraints" || true
  fi
  for name in torch torchvision; do
    version=$(pip_version "$name")
    if [ -n "$version" ]; then echo "$name==$version" >>"$constraints"; fi
  done
  PIP_CONSTRAINT=$constraints "$python" -m pip install -r "$1"
  rm -f "$constraints"
}

before=$(torch_build)
step=$1
shift
case "$step ${1:-}" in
  "torchvision keep") say "torchvision stays as it is" ;;
  "torchvision wheel") torchvision_wheel "$2" "${3:-}" ;;
  "torchvision source") torchvision_source "$2" "${3:-}" ;;
  "packages "?*) packages "$1" ;;
  *) fail "unknown step: $step $*" ;;
esac
after=$(torch_build)
[ -z "$before" ] || [ "$before" = "$after" ] || fail "torch was replaced: it was $before, now it is $after"
