"""Ask a saved classifier, the way anybody would who has transformers and the folder, and nothing of this package.

Prints the class that answers and where its code comes from, then label and score of each text.

    python scripts/classify.py runs/demo/export 房间很干净 "the book is dull"
    python scripts/classify.py someone/dsx-sentiment-zh 房间很干净
"""

import argparse

from transformers import pipeline


def main() -> None:
    """Load by trust_remote_code and print label and score of each text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id of a saved classifier; its code is run")
    parser.add_argument("texts", nargs="+", help="texts to classify")
    arguments = parser.parse_args()

    answer = pipeline("text-classification", model=arguments.model, trust_remote_code=True, truncation=True)
    print(f"{type(answer.model).__name__} from {type(answer.model).__module__}")
    for text, result in zip(arguments.texts, answer(arguments.texts), strict=True):
        print(f"{result['label']:>10} {result['score']:.3f}  {text}")


if __name__ == "__main__":
    main()
