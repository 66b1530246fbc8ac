"""What obstore raises, as errors of this package."""

import pytest
from obstore import exceptions

import ragged_format as rf
from ragged_pipeline.stores.calls import called


@pytest.mark.parametrize("host", ["169.254.169.254", "metadata.google.internal"])
def test_missing_credentials_are_named(host):
    text = f"Generic S3 error: Error performing PUT http://{host}/latest/api/token"
    with pytest.raises(rf.StorageError, match="no credentials") as caught, called("s3://b/x"):
        raise exceptions.GenericError(text)
    assert "AWS_ACCESS_KEY_ID" in caught.value.remedy


def test_other_faults_are_of_the_store():
    with pytest.raises(rf.StorageError, match="did not do what was asked"), called("s3://b/x"):
        raise exceptions.GenericError("Generic S3 error: no route to host")
