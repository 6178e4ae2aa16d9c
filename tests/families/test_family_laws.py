"""The laws of whole decoders, for families with parts that others don't have."""

import pytest

from tests.families import test_deepseek_custom, test_gemma3n, test_gemma4, test_longcat_flash
from tests.laws import check_documents, check_execution, check_pieces, check_rejection
from tests.models import filled


MODELS = {
    "deepseek-custom": test_deepseek_custom.SMALL,
    "longcat-flash": test_longcat_flash.SMALL,
    "gemma3n": test_gemma3n.SMALL,
    **test_gemma4.MODELS,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return filled(MODELS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [(1,) * 9, (6, 1, 3)], ids=str)
def test_pieces_equal_the_whole(model, pieces):
    check_pieces(model, pieces)


@pytest.mark.slow
def test_packed_documents_are_alone(model):
    check_documents(model)


@pytest.mark.slow
def test_rejected_tokens_leave_no_trace(model):
    check_rejection(model)


@pytest.mark.slow
def test_every_execution_is_the_same(model):
    check_execution(model, fsdp=2, tensor=2, data=2)
