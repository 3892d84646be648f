"""Which indices of a DTensor each rank holds: integers, by torch's splitting rules, and the boxes that they make up.

``runs`` are index sets; ``layout`` says which of them lie on which rank of a mesh; ``parts`` are those of this rank.
"""
