/* Decodes the part of a JPEG that a crop needs, and resamples it: libjpeg-turbo crop_scanline and skip_scanlines, its IDCT
 * scaled by a power of two where the crop is at least twice the target (other factors have no SIMD), then two-tap bilinear.
 * Built and called by roi.py; holds no state, so any number of threads may be inside. */
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <jpeglib.h>
#include <jerror.h>

enum { ROI_OK = 0, ROI_ERROR = 1, ROI_UNSUPPORTED = 2 };
enum { SHIFT = 11, ONE = 1 << SHIFT }; /* fixed-point weights: 8 + 2 * 11 bits fit into 32 */

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf escape;
    int cut_short;
} errors;

static void on_error(j_common_ptr info) { longjmp(((errors *)info->err)->escape, 1); }

static void on_message(j_common_ptr info, int level) {
    /* other warnings, such as stray bytes before a marker, are common in data sets and do no harm */
    if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF) ((errors *)info->err)->cut_short = 1;
}

static void begin(struct jpeg_decompress_struct *info, errors *err) {
    info->err = jpeg_std_error(&err->base);
    err->base.error_exit = on_error;
    err->base.emit_message = on_message;
    err->cut_short = 0;
}

/* Width and height into size[2]. */
int roi_size(const uint8_t *data, size_t length, int *size, char *message) {
    struct jpeg_decompress_struct info;
    errors err;
    begin(&info, &err);
    if (setjmp(err.escape)) {
        err.base.format_message((j_common_ptr)&info, message);
        jpeg_destroy_decompress(&info);
        return ROI_ERROR;
    }
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, (unsigned char *)data, length);
    jpeg_read_header(&info, TRUE);
    size[0] = (int)info.image_width;
    size[1] = (int)info.image_height;
    int components = info.num_components;
    jpeg_destroy_decompress(&info);
    return components == 1 || components == 3 ? ROI_OK : ROI_UNSUPPORTED;
}

/* For each of `side` outputs: the first of two neighbouring inputs, and the weight of the second. */
static void taps(int side, double start, double length, int offset, int count, int *first, int *weight) {
    for (int i = 0; i < side; i++) {
        double at = start + (i + 0.5) * length / side - 0.5;
        double low = start, high = start + length - 1; /* nothing outside the box enters */
        if (at > high) at = high;
        if (at < low) at = low;
        at -= offset;
        if (at < 0) at = 0;
        if (at > count - 1) at = count - 1;
        int whole = (int)at;
        if (whole > count - 2 && count > 1) whole = count - 2;
        first[i] = whole;
        weight[i] = count > 1 ? (int)((at - whole) * ONE + 0.5) : 0;
    }
}

static void horizontal(const uint8_t *row, int side, const int *first, const int *weight, int step, int32_t *out) {
    for (int i = 0; i < side; i++) {
        const uint8_t *a = row + 3 * first[i];
        const uint8_t *b = a + step;
        int w = weight[i];
        for (int c = 0; c < 3; c++) out[3 * i + c] = a[c] * (ONE - w) + b[c] * w;
    }
}

static void resample(const uint8_t *pixels, int width, int height, int side, const int *xf, const int *xw, const int *yf,
                     const int *yw, int32_t *lines, uint8_t *out) {
    int32_t *upper = lines, *lower = lines + 3 * side;
    int have_upper = -1, have_lower = -1, step = width > 1 ? 3 : 0;
    for (int y = 0; y < side; y++) {
        int a = yf[y], b = height > 1 ? a + 1 : a;
        if (have_upper != a) {
            if (have_lower == a) {
                int32_t *swap = upper; upper = lower; lower = swap;
                have_lower = have_upper;
            } else {
                horizontal(pixels + (size_t)3 * width * a, side, xf, xw, step, upper);
            }
            have_upper = a;
        }
        if (have_lower != b) {
            horizontal(pixels + (size_t)3 * width * b, side, xf, xw, step, lower);
            have_lower = b;
        }
        int w = yw[y];
        uint8_t *line = out + (size_t)3 * side * y;
        for (int i = 0; i < 3 * side; i++)
            line[i] = (uint8_t)((upper[i] * (ONE - w) + lower[i] * w + (1 << (2 * SHIFT - 1))) >> (2 * SHIFT));
    }
}

static void mirror(uint8_t *out, int side) {
    for (int y = 0; y < side; y++) {
        uint8_t *line = out + (size_t)3 * side * y;
        for (int i = 0, j = side - 1; i < j; i++, j--)
            for (int c = 0; c < 3; c++) {
                uint8_t keep = line[3 * i + c];
                line[3 * i + c] = line[3 * j + c];
                line[3 * j + c] = keep;
            }
    }
}

/* The box {left, top, width, height} of the image, resampled to side x side RGB in `out`, mirrored if asked. */
int roi_decode(const uint8_t *data, size_t length, const double *box, int side, int flip, uint8_t *out, char *message) {
    struct jpeg_decompress_struct info;
    errors err;
    uint8_t *volatile pixels = NULL;
    void *volatile work = NULL;
    begin(&info, &err);
    if (setjmp(err.escape)) {
        err.base.format_message((j_common_ptr)&info, message);
        jpeg_destroy_decompress(&info);
        free(pixels);
        free(work);
        return ROI_ERROR;
    }
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, (unsigned char *)data, length);
    jpeg_read_header(&info, TRUE);
    info.out_color_space = JCS_RGB;
    info.dct_method = JDCT_ISLOW; /* the fast one is no faster with SIMD and costs 5 dB */
    int scale = 1;
    while (scale < 8 && box[2] >= 2.0 * scale * side && box[3] >= 2.0 * scale * side) scale *= 2;
    info.scale_num = 1;
    info.scale_denom = scale;
    jpeg_start_decompress(&info);

    double left = box[0] / scale, top = box[1] / scale, wide = box[2] / scale, high = box[3] / scale;
    int full_width = (int)info.output_width, full_height = (int)info.output_height;
    /* one pixel more on each side: the chroma upsampling at the edge of what is decoded differs from the whole image's */
    int x0 = (int)left - 2, x1 = (int)(left + wide) + 3, y0 = (int)top, y1 = (int)(top + high) + 2;
    if (x0 < 0) x0 = 0;
    if (x1 > full_width) x1 = full_width;
    if (y0 > full_height - 1) y0 = full_height - 1;
    if (y1 > full_height) y1 = full_height;
    JDIMENSION offset = (JDIMENSION)x0, width = (JDIMENSION)(x1 - x0);
    if (x0 > 0 || x1 < full_width) jpeg_crop_scanline(&info, &offset, &width);
    if (y0 > 0) jpeg_skip_scanlines(&info, (JDIMENSION)y0);
    width = info.output_width;
    int height = y1 - y0;

    pixels = malloc((size_t)3 * width * height);
    work = malloc(sizeof(int) * 4 * side + sizeof(int32_t) * 6 * side);
    if (!pixels || !work) ERREXIT1(&info, JERR_OUT_OF_MEMORY, 0);
    for (int y = 0; y < height;) {
        JSAMPROW row = pixels + (size_t)3 * width * y;
        y += (int)jpeg_read_scanlines(&info, &row, 1);
    }
    if (err.cut_short) {
        strcpy(message, "the file is cut short");
        jpeg_destroy_decompress(&info);
        free(pixels);
        free(work);
        return ROI_ERROR;
    }
    int *xf = work, *xw = xf + side, *yf = xw + side, *yw = yf + side;
    taps(side, left, wide, (int)offset, (int)width, xf, xw);
    taps(side, top, high, y0, height, yf, yw);
    resample(pixels, (int)width, height, side, xf, xw, yf, yw, (int32_t *)(yw + side), out);
    if (flip) mirror(out, side);
    jpeg_destroy_decompress(&info);
    free(pixels);
    free(work);
    return ROI_OK;
}

/* The same for the box {left, top, width, height} of width x height RGB pixels that need no decoding. */
int roi_resample(const uint8_t *pixels, int width, int height, const double *box, int side, int flip, uint8_t *out) {
    int *xf = malloc(sizeof(int) * 4 * side + sizeof(int32_t) * 6 * side);
    if (!xf) return ROI_ERROR;
    int *xw = xf + side, *yf = xw + side, *yw = yf + side;
    taps(side, box[0], box[2], 0, width, xf, xw);
    taps(side, box[1], box[3], 0, height, yf, yw);
    resample(pixels, width, height, side, xf, xw, yf, yw, (int32_t *)(yw + side), out);
    if (flip) mirror(out, side);
    free(xf);
    return ROI_OK;
}
