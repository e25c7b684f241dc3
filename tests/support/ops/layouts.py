"""Views of tensors in the layouts of memory that a kernel may meet."""

# The shape of a leaf for a shape, and the view of the leaf that has it.
LAYOUTS = {
    "plain": (lambda shape: shape, lambda leaf, shape: leaf),
    "transposed": (
        lambda shape: (*shape[:-3], *shape[-3:-1][::-1], *shape[-1:]),
        lambda leaf, shape: leaf.transpose(-3, -2) if len(shape) > 2 else leaf,
    ),
    "columns": (
        lambda shape: (*shape[:-2], *shape[-2:][::-1]),
        lambda leaf, shape: leaf.mT if len(shape) > 1 else leaf,
    ),
    "step": (lambda shape: tuple(2 * n for n in shape), lambda leaf, shape: leaf[(slice(1, None, 2),) * len(shape)]),
    "slice": (
        lambda shape: tuple(n + 3 for n in shape),
        lambda leaf, shape: leaf[tuple(slice(2, 2 + n) for n in shape)],
    ),
    "expanded": (lambda shape: (1, *shape[1:]) if shape else shape, lambda leaf, shape: leaf.expand(shape)),
}
