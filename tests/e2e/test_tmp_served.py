from tests.e2e.test_served import *
from tests.e2e.conftest import *
@pytest.fixture(scope="module")
def trained(): return Path("/tmp/dev/check/pt2/served0/run")
