"""What a request cost, in one line."""

from shared.cli.generate import tokens_per_s, usage_line
from shared.pb.quire.v1 import inference_pb2


def test_the_rate_is_of_the_tokens_behind_the_first():
    """The wait for the first token is no part of `generate_s`."""
    usage = inference_pb2.Usage(generated_tokens=21, time_to_first_token_s=1.5, generate_s=2.0)
    assert tokens_per_s(usage) == 10.0
    assert "first after 1.50 s, 10.0 tokens/s" in usage_line(usage)


def test_one_token_has_no_rate():
    assert tokens_per_s(inference_pb2.Usage(generated_tokens=1, time_to_first_token_s=1.5, generate_s=0.1)) == 0.0
