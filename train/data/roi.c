/* Decodes the part of a JPEG that a crop needs, and resamples it: libjpeg-turbo's crop_scanline and skip_scanlines, its IDCT
 * scaled by a power of two if the crop is at least twice the target (other factors have no SIMD), then two-tap bilinear.
 * Built and called by roi.py; stateless, so any number of threads may call it at once. */
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <jpeglib.h>
#include <jerror.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { ROI_OK = 0, ROI_ERROR = 1, ROI_UNSUPPORTED = 2 };

typedef float quad __attribute__((vector_size(16))); /* the channels of a pixel; the fourth is unused */
enum { PAD = 4 }; /* floats that a quad may read beyond the end of its row */

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf escape;
    int cut_short;
} errors;

static void on_error(j_common_ptr info) { longjmp(((errors *)info->err)->escape, 1); }

static void on_message(j_common_ptr info, int level) {
    /* other warnings, such as stray bytes before a marker, are common in data sets and harmless */
    if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF) ((errors *)info->err)->cut_short = 1;
}

static void begin(struct jpeg_decompress_struct *info, errors *err) {
    info->err = jpeg_std_error(&err->base);
    err->base.error_exit = on_error;
    err->base.emit_message = on_message;
    err->cut_short = 0;
}

/* Writes width and height to size[2]. */
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

/* For each of `side` outputs, the first of two neighbouring inputs and the weight of the second. */
static void taps(int side, double start, double length, int offset, int count, int flip, int *first, float *weight) {
    for (int i = 0; i < side; i++) {
        double at = start + (i + 0.5) * length / side - 0.5;
        double low = start, high = start + length - 1; /* pixels outside the box do not contribute */
        if (at > high) at = high;
        if (at < low) at = low;
        at -= offset;
        if (at < 0) at = 0;
        if (at > count - 1) at = count - 1;
        int whole = (int)at, place = flip ? side - 1 - i : i;
        if (whole > count - 2 && count > 1) whole = count - 2;
        first[place] = whole;
        weight[place] = count > 1 ? (float)(at - whole) : 0;
    }
}

/* Interpolates between two rows: one multiplication per byte, which the compiler vectorises. */
static void vertical(const uint8_t *restrict upper, const uint8_t *restrict lower, float weight, int count,
                     float *restrict out) {
    for (int i = 0; i < count; i++) out[i] = (float)upper[i] + (float)(lower[i] - upper[i]) * weight;
}

/* Four floats to bytes, rounded down. */
static uint32_t bytes(quad values) {
#ifdef __SSE2__ /* the compiler does not vectorise the portable version */
    __m128i words = _mm_cvttps_epi32((__m128)values);
    words = _mm_packs_epi32(words, words);
    return (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(words, words));
#else
    uint8_t four[4];
    uint32_t one;
    for (int c = 0; c < 4; c++) four[c] = (uint8_t)values[c];
    memcpy(&one, four, sizeof one);
    return one;
#endif
}

static uint32_t between(const float *row, int first, int step, float weight) {
    quad left, right;
    memcpy(&left, row + 3 * first, sizeof left);
    memcpy(&right, row + 3 * first + step, sizeof right);
    return bytes(left + (right - left) * weight + 0.5f);
}

/* Interpolates along one row. `out` is written from left to right: the next pixel overwrites a pixel's fourth byte. */
static void horizontal(const float *row, int side, const int *first, const float *weight, int step, uint8_t *out) {
    uint32_t pixel;
    for (int i = 0; i + 1 < side; i++) {
        pixel = between(row, first[i], step, weight[i]);
        memcpy(out + 3 * i, &pixel, 4);
    }
    pixel = between(row, first[side - 1], step, weight[side - 1]);
    memcpy(out + 3 * (side - 1), &pixel, 3);
}

/* Resamples the box {left, top, wide, high} of an image, of which `pixels` has width x height pixels from (x0, y0) on. */
static int resample(const uint8_t *pixels, int width, int height, int x0, int y0, const double *box, int side, int flip,
                    uint8_t *out) {
    size_t line = (size_t)3 * width + PAD;
    int *xf = malloc((sizeof(int) + sizeof(float)) * 2 * side + sizeof(float) * line);
    if (!xf) return ROI_ERROR;
    int *yf = xf + side, x_step = width > 1 ? 3 : 0;
    float *xw = (float *)(yf + side), *yw = xw + side, *row = yw + side;
    taps(side, box[0], box[2], x0, width, flip, xf, xw);
    taps(side, box[1], box[3], y0, height, 0, yf, yw);
    memset(row + 3 * width, 0, PAD * sizeof(float));
    for (int y = 0; y < side; y++) {
        const uint8_t *upper = pixels + (size_t)3 * width * yf[y];
        vertical(upper, height > 1 ? upper + (size_t)3 * width : upper, yw[y], 3 * width, row);
        horizontal(row, side, xf, xw, x_step, out + (size_t)3 * side * y);
    }
    free(xf);
    return ROI_OK;
}

/* Decodes the box {left, top, width, height} and resamples it to side x side RGB in `out`, mirrored if `flip`. */
int roi_decode(const uint8_t *data, size_t length, const double *box, int side, int flip, uint8_t *out, char *message) {
    struct jpeg_decompress_struct info;
    errors err;
    uint8_t *volatile pixels = NULL;
    begin(&info, &err);
    if (setjmp(err.escape)) {
        err.base.format_message((j_common_ptr)&info, message);
        jpeg_destroy_decompress(&info);
        free(pixels);
        return ROI_ERROR;
    }
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, (unsigned char *)data, length);
    jpeg_read_header(&info, TRUE);
    info.out_color_space = JCS_RGB;
    info.dct_method = JDCT_ISLOW; /* the fast method is no faster with SIMD and costs 5 dB */
    int scale = 1;
    while (scale < 8 && box[2] >= 2.0 * scale * side && box[3] >= 2.0 * scale * side) scale *= 2;
    info.scale_num = 1;
    info.scale_denom = scale;
    jpeg_start_decompress(&info);

    double scaled[4] = {box[0] / scale, box[1] / scale, box[2] / scale, box[3] / scale};
    double left = scaled[0], top = scaled[1], wide = scaled[2], high = scaled[3];
    int full_width = (int)info.output_width, full_height = (int)info.output_height;
    /* with a margin, because chroma upsampling at the edge of the decoded area differs from that of the whole image */
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
    if (!pixels) ERREXIT1(&info, JERR_OUT_OF_MEMORY, 0);
    for (int y = 0; y < height;) {
        JSAMPROW row = pixels + (size_t)3 * width * y;
        y += (int)jpeg_read_scanlines(&info, &row, 1);
    }
    if (err.cut_short) {
        strcpy(message, "the file is truncated");
        jpeg_destroy_decompress(&info);
        free(pixels);
        return ROI_ERROR;
    }
    if (resample(pixels, (int)width, height, (int)offset, y0, scaled, side, flip, out) != ROI_OK)
        ERREXIT1(&info, JERR_OUT_OF_MEMORY, 0);
    jpeg_destroy_decompress(&info);
    free(pixels);
    return ROI_OK;
}

/* The same for already decoded pixels: width x height, RGB. */
int roi_resample(const uint8_t *pixels, int width, int height, const double *box, int side, int flip, uint8_t *out) {
    return resample(pixels, width, height, 0, 0, box, side, flip, out);
}
