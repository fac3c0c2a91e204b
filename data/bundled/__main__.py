"""Prints the counts of the bundled prompts and one prompt of each kind: `python -m headstart.data.bundled`."""

from collections import Counter

from headstart.data.bundled.prompts import all_prompts, further_wordings, kinds, split_of, topics

counts = Counter(map(split_of, all_prompts()))
print(f"{len(kinds())} kinds, {len(topics())} topics, {len(all_prompts())} prompts:", dict(counts))
print(len(further_wordings()), "other wordings of them:", dict(Counter(map(split_of, further_wordings()))))
for kind in kinds():
    row = next(row for row in all_prompts() if row["kind"] == kind)
    print(f"\n[{row['row_id']}]", *(message["content"] for message in row["messages"]), sep="\n")
