"""Peak performance of GPUs from their data sheets, the reference if no other GPU of the same model is available."""

from __future__ import annotations

import re

# TFLOP/s of dense products in fp32 and in 16 bits, from the vendor's data sheets; the SXM version unless named. As in
# train/hardware.py, which may not be imported here.
PEAKS = {
    "T4": (8.1, 65.0),
    "V100": (15.7, 125.0),
    "A10": (31.2, 125.0),
    "A100": (19.5, 312.0),
    "L4": (30.3, 121.0),
    "L40S": (91.6, 362.0),
    "H100 PCIe": (51.0, 756.0),
    "H100": (67.0, 989.0),
    "H200": (67.0, 989.0),
    "B200": (80.0, 2250.0),
    # DGX Spark. NVIDIA gives 1 PFLOP/s in sparse FP4 only: half of it dense, a quarter of that in 16 bits; fp32 from
    # techpowerup.com/gpu-specs/gb10.c4342
    "GB10": (29.7, 125.0),
}
REACHED = 0.4  # share of the peak that a healthy GPU reaches in one large product, even with a low power limit


def peak(gpu: str, precision: str) -> float | None:
    """Return the peak in TFLOP/s; None for a GPU that is not in the table."""
    found = next((peaks for name, peaks in PEAKS.items() if re.search(rf"\b{name}\b", gpu)), None)
    return found and found[0 if precision == "none" else 1]
