"""The prompts, if no others are given: text of several kinds, so that a trained model meets what it knows."""

from __future__ import annotations

TEXT = """\
The harbour lay quiet in the early morning. A few boats moved with the tide, and an old man sat on the wall mending his
nets, as he had done every day since the war. "The wind will turn before noon," he said, and nobody doubted him.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Answer: 3 hours and 25 minutes.
Question: What is the capital of Portugal? Answer: Lisbon.

Die Bibliothek ist montags geschlossen; am Dienstag oeffnet sie um zehn Uhr. Le marche commence a huit heures.

SELECT name, COUNT(*) AS orders FROM customers JOIN purchases USING (customer_id) GROUP BY name HAVING orders > 3;

Water boils at a lower temperature on a mountain, because the pressure of the air is lower there. For the same reason
potatoes take longer to cook, although the water seems to boil as hard as it does in the valley.
"""
