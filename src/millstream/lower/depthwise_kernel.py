"""The Triton kernel of ``depthwise``, apart from it because Triton is not everywhere."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

# Compiled for each window and for what the number of channels is a multiple of, not for each size of image.
_ANY = ["num_pixels", "height", "width", "out_height", "out_width", "channels", "pad_y", "pad_x"]


@triton.jit(do_not_specialize=_ANY)
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
    pad_y,
    pad_x,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
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
    line = pixel // out_width
    y = line % out_height * STRIDE_Y - pad_y
    x = (pixel - line * out_width) * STRIDE_X - pad_x
    first = ((line // out_height * height + y) * width + x) * channels
    values = image + first[:, None] + channel[None, :]
    taps = weight + channel * (KERNEL_HEIGHT * KERNEL_WIDTH)
    total = tl.zeros((TILE_PIXELS, TILE_CHANNELS), tl.float32)
    for i in tl.static_range(KERNEL_HEIGHT):
        row = y + i * DILATION_Y
        in_rows = is_pixel & (row >= 0) & (row < height)
        for j in tl.static_range(KERNEL_WIDTH):
            column = x + j * DILATION_X
            inside = in_rows & (column >= 0) & (column < width)
            value = tl.load(values + j * DILATION_X * channels, inside[:, None] & is_channel[None, :], 0.0)
            tap = tl.load(taps + (i * KERNEL_WIDTH + j), is_channel, 0.0)
            total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
        values += DILATION_Y * width * channels
    place = (pixel * channels)[:, None] + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), is_pixel[:, None] & is_channel[None, :])
