"""The Triton kernel of ``depthwise``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

# Compiled for each window and for what the number of channels is a multiple of, not for each size of image.
_ANY = (
    *("num_pixels", "height", "width", "out_height", "out_width", "channels"),
    *("stride_y", "stride_x", "pad_y", "pad_x", "dilation_y", "dilation_x"),
)


@triton.jit(do_not_specialize=list(_ANY))
def depthwise(
    image,
    weight,
    out,
    num_pixels,
    height,
    width,
    out_height,
    out_width,
    channels,
    stride_y,
    stride_x,
    pad_y,
    pad_x,
    dilation_y,
    dilation_x,
    AT_ONCE: tl.constexpr,
    KERNEL_HEIGHT: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    TILE_PIXELS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Convolve each channel of an image with its own window.

    Args:
        image: In memory: images, rows, columns, channels.
        weight: In memory: channels, rows, columns.
        out: Like ``image``.
        num_pixels: Of ``out``, of all its images.
        channels: How many times ``AT_ONCE`` there are; so the compiler knows what they are a multiple of.
    """
    channels *= AT_ONCE
    pixel = tl.program_id(0) * TILE_PIXELS + tl.arange(0, TILE_PIXELS)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    is_pixel, is_channel = pixel < num_pixels, channel < channels
    y = (pixel // out_width) % out_height * stride_y - pad_y
    x = pixel % out_width * stride_x - pad_x
    first = ((pixel // (out_width * out_height) * height + y) * width + x) * channels
    total = tl.zeros((TILE_PIXELS, TILE_CHANNELS), tl.float32)
    for i in tl.static_range(KERNEL_HEIGHT):
        row = y + i * dilation_y
        in_rows = is_pixel & (row >= 0) & (row < height)
        for j in tl.static_range(KERNEL_WIDTH):
            column = x + j * dilation_x
            inside = in_rows & (column >= 0) & (column < width)
            at = first + (i * dilation_y * width + j * dilation_x) * channels
            value = tl.load(image + at[:, None] + channel[None, :], inside[:, None] & is_channel[None, :], 0.0)
            tap = tl.load(weight + channel * (KERNEL_HEIGHT * KERNEL_WIDTH) + (i * KERNEL_WIDTH + j), is_channel, 0.0)
            total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
    place = (pixel * channels)[:, None] + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), is_pixel[:, None] & is_channel[None, :])
