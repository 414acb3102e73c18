"""Forwards at few fixed shapes, captured as CUDA graphs: the static engine of the Transformers target.

    rows and lengths of a step      ->  a shape of the buckets (`shapes`)
    trees, slots, moves             ->  one buffer, one copy to the device (`buffers`)
    first forward of a shape        ->  captured (`graphs`)
    every other forward             ->  replayed: one launch instead of some fifty a layer

Nothing that differs between two forwards of a shape is a number in Python: tokens, positions, lengths, slots and the
ancestors of nodes are read from the buffer, the mask is built from them inside the graph, and the cache is written
through slots and read as a view that does not change (`cache`). Whether a model keeps to this is tested (`gate`).
"""
