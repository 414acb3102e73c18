"""Every system of the literature that this library covers: its command, what it saves here, and what its paper reports.

system        what a row of the table is: a command and a description
training_free, draft_models, heads    the rows, which are data
rows          all of them, and what is not covered
measure       a row against plain decoding, with the bench's and `check`'s own code
record        the file of the results, written after every row
command       `python -m research systems`
"""
