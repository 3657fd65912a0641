#!/bin/sh
# Compile the trainer's decoder (train/data/roi.c) for this image: decoder.sh ROI_C FOLDER
# The trainer finds it there by its source and the machine (train/data/roi.py). Without a compiler or libjpeg-turbo, they
# are installed with apt; if that fails, the folder stays empty, and the trainer decodes with torchvision.
set -u
library=$2/roi-$(sha256sum "$1" | cut -c1-16)-$(uname -m).so
mkdir -p "$2"

compile() { # with libjpeg-turbo beside it: the image may not have it
  cc -O3 -fPIC -shared -ffp-contract=off -Wl,-rpath,'$ORIGIN' -o "$library" "$1" -ljpeg -lm &&
    ldd "$library" | sed -n 's/^.*libjpeg.* => \(\/[^ ]*\).*$/\1/p' | while IFS= read -r file; do cp -L "$file" "$2/"; done
}

compile "$@" && exit
echo "launcher: no compiler or no libjpeg-turbo: installing them for this step"
DEBIAN_FRONTEND=noninteractive
export DEBIAN_FRONTEND
apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev libjpeg-dev && compile "$@" && exit
rm -f "$library"
echo "launcher: the trainer's decoder could not be compiled; it will decode with torchvision"
