"""Prints the counts of the bundled prompts and one prompt of each kind: `python -m headstart.data.bundled`."""

from collections import Counter

from headstart.data.bundled.prompts import all_prompts, kinds, split_of, topics

counts = Counter(map(split_of, all_prompts()))
print(f"{len(kinds())} kinds, {len(topics())} topics, {len(all_prompts())} prompts:", dict(counts))
for kind in kinds():
    row = next(row for row in all_prompts() if row["kind"] == kind)
    print(f"\n[{row['row_id']}]", *(message["content"] for message in row["messages"]), sep="\n")
