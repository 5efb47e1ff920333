"""How much a region looks at, copies and holds, each limit with a reason. Limits that may be silent are in the README."""

from __future__ import annotations

#: Levels of closures, containers and objects that are opened: a cache, its layers, their list, one of these, its attributes.
LEVELS = 6
#: Levels below an object of a library, whose content is not put back, in which modules and tensors are looked for.
LEVELS_OF_OTHERS = 3
#: Values looked at in one walk. A trainer reaches everything; a cache of a hundred layers has a few hundred.
MOST_LOOKS = 2000
#: Entries read in one walk, of all containers together. What is unchanged is read three times a step.
MOST_ENTRIES_READ = 20_000
#: Entries up to which a container is structure. Of a longer list, deque or dict only the length and what is added are noted:
#: a copy of a log of 100,000 losses would take as long as a small block.
MOST_ENTRIES = 1000

# The limits of tensors, in bytes, but for one.

#: A tensor with a history, in an attribute of a module, is copied up to this size: a sum to which forward adds in place.
MOST_COPIED = 1 << 16
#: Up to this size tensors are small. A copy of each costs less than one activation of a layer that has such buffers; a copy of
#: each mask of 64 KiB was five times what the regions of a small GPT hold besides.
SMALL = 1 << 14
#: Up to this size tensors which no module owns are copied. A larger one is a batch of data, more often than state.
MOST_OUTSIDE = 1 << 20
#: Parameters without gradients are copied up to this size, all of a region together: a few modules keep state in them, and most
#: are the frozen weights of a large model.
MOST_FROZEN = 1 << 24
#: In how many forwards. A name that is bound anew for the first time in a later one is not noticed.
LOOKS_AT_FROZEN = 4
