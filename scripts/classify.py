"""Ask a saved classifier, the way anybody would who has transformers and the folder, and nothing of this package.

Prints the class that answers and where its code comes from, then label and score of each text; of a multi-label model
every label with a score of 0.5 or more.

    python scripts/classify.py runs/demo/export 房间很干净 "the book is dull"
    python scripts/classify.py someone/dsx-sentiment-zh 房间很干净
"""

import argparse

from transformers import AutoConfig, pipeline


def main() -> None:
    """Load by trust_remote_code and print label and score of each text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id of a saved classifier; its code is run")
    parser.add_argument("texts", nargs="+", help="texts to classify")
    arguments = parser.parse_args()

    config = AutoConfig.from_pretrained(arguments.model, trust_remote_code=True)
    head = (config.architectures or ["no class"])[0]
    if not head.endswith("ForSequenceClassification"):
        parser.error(f"{arguments.model} holds {head}, but texts are classified by a ...ForSequenceClassification")
    answer = pipeline("text-classification", model=arguments.model, trust_remote_code=True, truncation=True)
    print(f"{type(answer.model).__name__} from {type(answer.model).__module__}")
    several = config.problem_type == "multi_label_classification"
    for text, results in zip(arguments.texts, answer(arguments.texts, top_k=None), strict=True):
        shown = [result for result in results if result["score"] >= 0.5] if several else results[:1]
        labels = ", ".join(f"{result['label']} {result['score']:.3f}" for result in shown)
        print(f"{labels or 'no label':>16}  {text}")


if __name__ == "__main__":
    main()
